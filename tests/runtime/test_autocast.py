"""Autocast around a call, and within one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import T2, tokens
from tests.runtime.bodies import (
    both_ways,
    check,
    check_replayed,
    compiled,
    equal,
    first,
    llama,
    ready,
    replays,
    run,
    runners,
    small,
)

Region = Callable[[], contextlib.AbstractContextManager[Any]]


def low() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def off() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=False)


@pytest.fixture(autouse=True)
def nothing_stays_entered() -> Any:
    """A weight that autocast has cast is cast anew in the next region: torch forgets it where the last one ends."""
    yield
    assert not torch.is_autocast_enabled("cpu")
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        with low():
            assert bool(linear(x).any())
        linear.weight.zero_(), linear.bias.zero_()
        with low():
            assert not bool(linear(x).any())


@both_ways
def test_autocast_is_followed_both_ways(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    for _ in range(2):
        for n in (7, 12):
            with low():
                got, want = run(body, n), run(eager, n)
            assert float((want - run(eager, n)).abs().max()) > 1e-4
            equal(got, want, 2e-2)
            check(body, eager, n)


class Within(T2):
    """Its layers, or all but the last, are in a region, which its end is in too."""

    def __init__(self, region: Region, *, some: bool = False) -> None:
        super().__init__()
        self.region, self.some = region, some

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        inside = self.layers[:-1] if self.some else self.layers
        with self.region():
            for layer in inside:
                x = layer(x)
        for layer in self.layers[len(inside) :]:
            x = layer(x)
        with self.region():
            # Puts rows together, so it is not in a graph.
            return self.layers[0].out(self.norm(x).mean(-2, keepdim=True))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("region", "around", "some"),
    [
        (low, contextlib.nullcontext, False),
        (low, contextlib.nullcontext, True),
        (off, low, False),
        (off, low, True),
        (low, low, True),
        (off, contextlib.nullcontext, False),
    ],
)
@both_ways
def test_a_region_around_attention(way: str, region: Region, around: Region, some: bool, compiler: str) -> None:
    module = Within(region, some=some).eval()
    eager, plain = copy.deepcopy(module), copy.deepcopy(module)
    plain.region = contextlib.nullcontext
    graphs = "none" if compiler == "inductor" else "tape"
    body = compiled(way, module, compiler=compiler, graphs=graphs)
    apart = False
    for n in (5, 6, 7, 12, 7):
        with around():
            got, want, other = run(body, n), run(eager, n), run(plain, n)
        # In bfloat16 roundings differ; where it is off, attention is in float32 too.
        equal(got, want, 1e-5 if region is off and not some else 2e-2)
        apart |= not torch.equal(want, other)
    # Else nothing would show that the region is followed.
    assert apart == ((region is low) == (around is contextlib.nullcontext))
    if graphs == "tape":
        assert replays(body) >= 3


class Failing(Within):
    """Some ids have no row in the body, more have none in what follows it."""

    def __init__(self) -> None:
        super().__init__(low)
        self.ends = nn.Embedding(50, 32)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        with self.region():
            x = self.layers[0].out(self.embed(input_ids)) + self.place(position_ids)
            for layer in self.layers:
                x = layer(x)
            return self.layers[0].out(x[:, -1]) @ self.ends(input_ids[:, -1]).mT


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("last", [60, 10**6])
@both_ways
def test_an_error_within_a_region_leaves_it(way: str, last: int, compiler: str) -> None:
    module = Failing().eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module, compiler=compiler)
    wrong = torch.tensor([[3, 4, 5, 6, last]])
    with torch.no_grad():
        for n in (5, 6, 7, 5):
            ids, positions = torch.arange(1, n + 1)[None], torch.arange(n)[None]
            equal(body(ids, positions), eager(ids, positions), 2e-2)
            for around in (contextlib.nullcontext, low):
                with around(), pytest.raises(IndexError):
                    body(wrong, torch.arange(5)[None])
                assert not torch.is_autocast_enabled("cpu")
                assert torch.autocast_increment_nesting() == 1
                torch.autocast_decrement_nesting()


class Mixed(nn.Module):
    """Attention that is written out, its scores in float32, and the product with the values in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(97, 32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        with off():
            weights = (q.float() @ k.float().transpose(-1, -2) * 8**-0.5).softmax(-1)
        with low():
            return self.out((weights @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("around", [contextlib.nullcontext, low])
def test_scores_and_values_of_different_dtypes(around: Region) -> None:
    module = Mixed().eval()
    eager = copy.deepcopy(module)
    body = compiled("compile", module)
    for n in (5, 6, 7, 12):
        inputs = tokens(n)[None], torch.arange(n)[None]
        with torch.no_grad(), around():
            equal(body(*inputs), eager(*inputs), 2e-2)
    assert replays(body) >= 3


@pytest.mark.parametrize("written_out", [False, True])
@both_ways
def test_queries_of_another_dtype_are_cast_as_torch_does(way: str, written_out: bool) -> None:
    """A rotation by tables in float32 leaves queries and keys in float32, and values in bfloat16."""
    module = llama()
    if written_out:
        module.set_attn_implementation("eager")
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n in (5, 6, 7, 12):
        with low():
            equal(first(run(body, n)), first(run(eager, n)), 2e-2)
    assert replays(body) >= 3
    assert {site.dtype for r in runners(body) for site in r.program.sites} == {torch.bfloat16}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@both_ways
def test_weights_that_change_in_place_are_followed_under_autocast(way: str, compiler: str) -> None:
    """Autocast keeps the weights that it has cast, which is no memory of the graph."""
    module = small()
    eager = copy.deepcopy(module)
    body = compiled(way, module, compiler=compiler)
    with torch.no_grad(), low():
        for n in (5, 6, 7):
            equal(run(body, n), run(eager, n), 2e-2)
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        with torch.no_grad():
            theirs.copy_(torch.randn_like(mine) * 0.3)
            mine.copy_(theirs)
    with torch.no_grad(), low():
        equal(run(body, 7), run(eager, 7), 2e-2)
    check_replayed(body, eager, 7) if compiler == "eager" and way == "compile" else check(body, eager, 7)
