"""The outputs of a replay belong to the caller, come back as the module made them, and work in any inference mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import T2, tokens
from tests.runtime.bodies import both_ways, check_replayed, compiled, equal, first, ready, replays, run, small


@both_ways
def test_b66_outputs_are_the_callers(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    y = first(run(body, 7))
    kept = [y, y.detach(), y[0:2], y.view(-1)]
    want = [t.clone() for t in kept]
    equal(y, run(eager, 7))
    check_replayed(body, eager, 7, 3, 12, seed=2)
    run(body, 7, 3).fill_(7.0)  # what the caller does to one output shows in no other
    for now, then in zip(kept, want, strict=True):
        assert torch.equal(now, then)
    check_replayed(body, eager, 7)


@both_ways
def test_without_cloning_an_output_is_a_view_that_the_next_call_overwrites(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module, clone_outputs=False)
    y = run(body, 7)
    equal(y, run(eager, 7))
    z = run(body, 7, 2)
    assert y.data_ptr() == z.data_ptr()
    assert torch.equal(y, z)
    equal(z, run(eager, 7, 2))
    check_replayed(body, eager, 3, 12, 8)


class Embedded(T2):
    """Takes hidden states, so that what it returns can be given to it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.parametrize("clone", [True, False])
@both_ways
def test_b67_outputs_are_inputs_of_the_next_call(way: str, clone: bool) -> None:
    module, other = Embedded(layers=1).eval(), Embedded(layers=1, heads=2).eval()
    f0, g0 = copy.deepcopy(module), copy.deepcopy(other)
    f, g = compiled(way, module, clone_outputs=clone), compiled(way, other, clone_outputs=clone)
    with torch.no_grad():
        for n in (5, 6):
            x = torch.randn(1, n, 32)
            f(x), g(x)
        before = replays(f), replays(g)
        for n in (7, 12):
            x = torch.randn(1, n, 32)
            equal(f(f(x)), f0(f0(x)), 1e-4)
            equal(g(f(x)), g0(f0(x)), 1e-4)
            equal(f(f(x)[:, :4]), f0(f0(x)[:, :4]), 1e-4)  # from one bucket into another, by a view
    assert replays(f) == before[0] + 10
    assert replays(g) == before[1] + 2


class Nested(T2):
    """Returns lists and dicts, None, numbers, and tensors that have nothing to do with tokens."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        x = self.embed(input_ids) + self.place(position_ids)
        aux = [x * 2]
        for layer in self.layers:
            x = layer(x)
            aux.append(x)
        return self.norm(x), aux, {"last": x + 1, "none": None, "norm": self.norm.weight * 2, "name": "nested"}


@both_ways
def test_b85_nested_outputs_come_back_as_they_were(way: str) -> None:
    module = Nested().eval()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    kept = run(body, 12)
    before = replays(body)
    for n in (7, 12, 3):
        hidden, aux, others = run(body, n)
        want = run(eager, n)
        equal(hidden, want[0])
        assert type(aux) is list
        assert len(aux) == 3
        for a, b in zip(aux, want[1], strict=True):
            equal(a, b)
        assert list(others) == ["last", "none", "norm", "name"]
        assert others["none"] is None
        assert others["name"] == "nested"
        equal(others["last"], want[2]["last"])
        equal(others["norm"], want[2]["norm"])
    assert replays(body) == before + 3
    for a, b in zip(kept[1], run(eager, 12)[1], strict=True):
        equal(a, b)


class Passing(T2):
    """Returns an input, a view of an input, and a parameter beside the hidden states."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        hidden = super().forward(input_ids, position_ids)
        return hidden, input_ids, position_ids[0], self.norm.weight, hidden


@both_ways
def test_outputs_that_are_inputs_or_weights_still_are(way: str) -> None:
    module = Passing(layers=1).eval()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    ids, positions = tokens(7)[None], torch.arange(7)[None]
    with torch.no_grad():
        hidden, same, view, weight, again = body(input_ids=ids, position_ids=positions)
    equal(hidden, run(eager, 7)[0])
    equal(again, hidden)
    assert same.data_ptr() == ids.data_ptr()
    assert view.data_ptr() == positions.data_ptr()
    assert weight.data_ptr() == module.norm.weight.data_ptr()
    run(body, 7, 2)
    assert torch.equal(same, tokens(7)[None])
    assert torch.equal(view, torch.arange(7))


@both_ways
def test_b101_one_body_in_every_inference_mode(way: str) -> None:
    module = small().requires_grad_(False)
    eager = copy.deepcopy(module)
    body = ready(way, module)
    want = run(eager, 7)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for made in (torch.no_grad, torch.inference_mode):
            with made():
                ids, positions = tokens(7)[None], torch.arange(7)[None]
            with mode():
                got = body(input_ids=ids, position_ids=positions)
                equal(got, want)
                assert not got.requires_grad
            if mode is not torch.inference_mode:
                # Usable by autograd afterwards.
                scale = torch.ones(32, requires_grad=True)
                (got * scale).sum().backward()
                equal(scale.grad, want.sum((0, 1)), 1e-4)
