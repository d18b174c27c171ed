"""A tensor of one number on the CPU: the number that the call gives is used, whatever the model does with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.models import T2
from tests.runtime.bodies import both_ways, compiled, equal, replays, run


class Numbered(T2):
    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__(layers=1)
        self.use = use

    def forward(self, input_ids: Tensor, position_ids: Tensor, number: Any = 1) -> Tensor:
        return self.use(super().forward(input_ids, position_ids), number)


USES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a factor": lambda x, n: x * n.item(),
    "an exponent": lambda x, n: x ** int(n),
    "a size": lambda x, n: x[..., : int(n.item())],
    "a branch": lambda x, n: x * 2 if n.item() > 2 else x * 3,
    "as it is": lambda x, n: x * n,
}


@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        ("a factor", torch.int64),
        ("a size", torch.int64),
        ("a branch", torch.int16),
        ("an exponent", torch.float64),
        ("as it is", torch.float32),
    ],
)
def test_b81_the_number_in_a_tensor_is_never_stale(use: str, dtype: torch.dtype) -> None:
    module = Numbered(USES[use]).eval()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, buckets=[8])
    mine = torch.tensor(3, dtype=dtype)
    for n, number, given in ((5, 3, None), (7, 2, None), (6, 3, mine), (7, 3, None), (6, 2, mine), (7, 3, mine)):
        if given is not None:
            given.fill_(number)
        tensor = torch.tensor(number, dtype=dtype) if given is None else given
        equal(run(body, n, number=tensor), run(eager, n, number=tensor))
    assert Reason.CHANGED not in fgc.report(body).fallbacks


def test_b81_the_tensor_of_the_traced_call_may_be_written_to() -> None:
    module = Numbered(USES["a factor"]).eval()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, buckets=[8])
    mine = torch.tensor(3)
    for n, number in ((5, 3), (7, 2), (6, 3), (7, 2)):
        mine.fill_(number)
        equal(run(body, n, number=mine), run(eager, n, number=mine))
    assert not fgc.report(body).fallbacks
    assert fgc.report(body).compiles == 2


def test_a_number_that_is_not_looked_at_traces_nothing_anew() -> None:
    module = Numbered(USES["as it is"]).eval()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, buckets=[8])
    run(body, 5, number=torch.tensor(1))
    for number in range(2, 6):
        equal(run(body, 7, number=torch.tensor(number)), run(eager, 7, number=torch.tensor(number)))
    assert fgc.report(body).compiles == 1
    assert replays(body) == 5


class Inside(T2):
    """Reads the number on the host in front of its attention."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, number: Any = 1) -> Tensor:
        x = self.embed(input_ids) * number.item() + self.place(position_ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("module", [Numbered(USES["a factor"]), Inside(layers=1)], ids=["after", "before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_number_that_is_read_on_the_host_is_no_failure_of_the_compiler(
    dtype: torch.dtype, module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    eager = copy.deepcopy(module).eval()
    body = compiled("compile", copy.deepcopy(module).eval(), buckets=[8])
    for n, number in ((5, 3), (7, 2), (5, 3)):
        given = torch.tensor(number, dtype=dtype)
        equal(run(body, n, number=given), run(eager, n, number=given))
    reasons = set(fgc.report(body).fallbacks)
    assert reasons <= {Reason.UNPROVEN}
    assert "Traceback" not in caplog.text


class RandomAtTheEnd(T2):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        hidden = super().forward(input_ids, position_ids)
        return hidden * torch.rand(()), torch.rand(3)


@both_ways
def test_random_numbers_after_the_body_are_drawn_at_each_call(way: str) -> None:
    module = RandomAtTheEnd(layers=1).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module, buckets=[8])
    for n in (5, 6, 7, 6):
        torch.manual_seed(n)
        got = run(body, n)
        torch.manual_seed(n)
        for a, b in zip(got, run(eager, n), strict=True):
            equal(a, b)
    assert replays(body) >= 3
