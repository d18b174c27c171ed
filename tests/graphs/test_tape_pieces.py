"""Compiled pieces: recorded as one call when they are marked, found out when they are not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fullgraph_compile.graphs import CaptureError, below, opaque
from tests.graphs.recorded import Recorded, check

ATTENDED: list[int] = []


def function(x: Tensor, n: int) -> Tensor:
    return (x.sin() + n) * x.cos()


@pytest.fixture(scope="module")
def inductor() -> Callable[[Tensor], Tensor]:
    """A kernel of Inductor, called as the piece loop calls it: without Dynamo around it."""
    from torch._inductor.compile_fx import compile_fx

    taken: list[Callable[..., Any]] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        taken.append(compile_fx(gm, examples))
        return taken[0]

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x: (x.sin() + 1) * x.cos(), backend=backend, fullgraph=True)(torch.randn(8, 4))
    return lambda x: taken[0](x)[0]


def test_a_marked_inductor_piece_is_one_node_and_exact(inductor: Callable[[Tensor], Tensor]) -> None:
    piece = opaque(inductor)
    recorded = Recorded(lambda x: piece(piece(x) + 1))
    assert recorded.tape.nodes == 4  # piece, add, piece, and the copy into the static output
    check(recorded)


def test_an_inductor_piece_that_is_not_marked_fails_the_self_check(inductor: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="opaque"):
        Recorded(inductor)
    with pytest.raises(CaptureError, match="opaque"):
        Recorded(lambda x: inductor(x * 2) + 1)


def test_a_kernel_that_nobody_sees_writing_recorded_memory_fails_the_self_check() -> None:
    def hidden(x: Tensor) -> Tensor:
        h = torch.empty_like(x)
        ctypes.memmove(h.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
        return h + 1

    with pytest.raises(CaptureError, match="not recorded"):
        Recorded(hidden)


def test_a_piece_behind_dynamo_is_run_compiled_both_when_recorded_and_when_replayed() -> None:
    runs: list[str] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            runs.append("compiled")
            return gm(*args)

        return call

    compiled = torch.compile(lambda x: function(x, 1), backend=backend, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    recorded = Recorded(opaque(compiled))
    runs.clear()
    check(recorded, (8, 3))
    assert len(runs) == 4  # two replays and two eager runs
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # never traced again under a mode


def test_parameters_of_a_piece_stay_parameters_for_its_guards() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    compiled = torch.compile(lambda x, w: x @ w, backend="eager", fullgraph=True)
    piece = opaque(compiled)
    torch._dynamo.utils.counters.clear()
    recorded = Recorded(lambda x: piece(x, weight))
    check(recorded)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        weight.mul_(3)
    check(recorded)


def test_integers_of_a_piece_are_frozen() -> None:
    piece = opaque(function)
    n = 1
    recorded = Recorded(lambda x: piece(x, n))
    x = torch.randn(8, 4)
    assert torch.equal(recorded(x), recorded.eager(x))
    n = 2
    assert not torch.equal(recorded(x), recorded.eager(x))


def test_ops_between_pieces_are_recorded_below() -> None:
    piece = opaque(function)

    def attention(x: Tensor) -> Tensor:
        ATTENDED.append(x.shape[0])
        return x.flip(0)

    def body(x: Tensor) -> Tensor:
        h = piece(x, 1)
        with below():
            h = attention(h)
        return piece(h, 2)

    ATTENDED.clear()
    recorded = Recorded(body)
    check(recorded)
    calls = len(ATTENDED)
    recorded(torch.randn(8, 4))
    assert len(ATTENDED) == calls  # a replay runs no Python of the op


def test_a_piece_that_returns_views_inputs_and_kept_memory() -> None:
    kept = torch.arange(4.0)

    @opaque
    def piece(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        y = x * 2
        return x, y, y[:, 1:], kept, 5

    def body(x: Tensor) -> Tensor:
        same, y, part, constant, n = piece(x)
        return same + y + part.sum(1, keepdim=True) + constant * n

    recorded = Recorded(body)
    other = Recorded(lambda x: x + 1, recorder=recorded.recorder)
    check(recorded)
    check(other)
    assert torch.equal(kept, torch.arange(4.0))  # not memory of the pool: never poisoned
    check(recorded)


def test_what_a_piece_makes_is_memory_of_the_pool() -> None:
    held: list[Tensor] = []
    piece = opaque(function)

    def body(x: Tensor) -> Tensor:
        held.append(piece(x, 1))
        return held[-1] + 1

    recorded = Recorded(body)
    leaked = held[-1]
    recorded(torch.randn(8, 4))
    assert not leaked.isnan().any()
    Recorded(lambda x: x + 1, recorder=recorded.recorder)(torch.randn(8, 4))
    assert leaked.isnan().all()


def test_opaque_is_a_plain_call_when_nothing_records() -> None:
    piece = opaque(function)
    x = torch.randn(2, 2)
    assert torch.equal(piece(x, 1), function(x, 1))
    assert piece.__name__ == "function"
