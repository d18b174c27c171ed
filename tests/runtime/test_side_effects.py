"""What a module does besides computing: what it stores, counts, and takes besides tokens."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

import fullgraph_compile as fgc
from tests.models import T2
from tests.runtime.bodies import Scaled, both_ways, compiled, equal, replays, run


class Remembering(T2):
    """Keeps its last hidden states and counts its calls, on the module."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.last: Tensor | None = None

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.last = super().forward(input_ids, position_ids)
        return self.last * 2


@both_ways
def test_b106_what_a_module_stores_of_a_call_is_of_that_call(way: str) -> None:
    module = Remembering().eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n in (5, 6, 7, 12, 7):
        equal(run(body, n, seed=n), run(eager, n, seed=n))
        assert module.last is not None
        equal(module.last, eager.last)


class Counting(T2):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(input_ids, position_ids) * self.seen


@both_ways
def test_b78_a_buffer_that_each_call_changes_is_changed_once_a_call(way: str) -> None:
    module = Counting().eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n in (5, 6, 7, 12, 7):
        equal(run(body, n), run(eager, n))
        assert torch.equal(module.seen, eager.seen)


@both_ways
def test_b80_a_number_on_the_cpu_is_read_at_each_call(way: str) -> None:
    module = Scaled(layers=1).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n, scale in ((5, 0.5), (6, 0.7), (7, 0.5), (7, 3.0), (12, 0.1), (7, 0.1)):
        value = torch.tensor(scale)
        equal(run(body, n, scale=value), run(eager, n, scale=value))
    value.fill_(9.0)
    equal(run(body, 7, scale=value), run(eager, 7, scale=value))
    assert replays(body) >= 6


@both_ways
def test_b81_a_python_number_is_never_stale(way: str) -> None:
    module = Scaled(layers=1).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n, scale in ((5, 2), (6, 3), (7, 2), (7, 4), (12, 5), (7, 3), (7, 2.5), (9, 0.5), (7, True)):
        equal(run(body, n, scale=scale), run(eager, n, scale=scale))


class Stepped(T2):
    def forward(self, input_ids: Tensor, position_ids: Tensor, step: int = 0) -> Tensor:
        return super().forward(input_ids, position_ids)


@both_ways
def test_b81_a_number_that_is_not_used_compiles_nothing_anew(way: str) -> None:
    module = Stepped(layers=1).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    run(body, 5, step=0), run(body, 6, step=1)
    before = fgc.report(body).compiles
    for step in range(2, 8):
        equal(run(body, 7, step=step), run(eager, 7))
    assert fgc.report(body).compiles == before
    assert replays(body) >= 6
