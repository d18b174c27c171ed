"""The module is still the module: copied, saved, compiled again, and beside or inside of another."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from tests.models import T2, tiny_causal_lm, tokens
from tests.runtime.bodies import OPTIONS, both_ways, check, check_replayed, compiled, equal, ready, replays, run, small


def test_b93_the_module_is_what_it_was() -> None:
    model = tiny_causal_lm("Llama")
    keys, kind, names = list(model.state_dict()), type(model), [n for n, _ in model.named_modules()]
    body = ready("compile", model)
    assert body is model
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == names
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32
    model.something = 3
    assert body.something == 3
    import inspect

    assert "input_ids" in inspect.signature(model.forward).parameters


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_compiled_module_is_right_and_of_its_own(how: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    before = replays(body)
    if how == "deepcopy":
        other = copy.deepcopy(module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert type(other) is type(module)
    check(other, eager, 7, 12)
    with torch.no_grad():
        other.embed.weight.mul_(-1)
        eager.embed.weight.mul_(-1)
    check(other, eager, 7, 12)
    eager.embed.weight.data.mul_(-1)
    assert replays(body) == before
    check_replayed(body, eager, 7, 12)


def test_save_and_load_of_a_compiled_model(tmp_path: Path) -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    ready("compile", model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    for a, b in zip(loaded.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    equal(run(loaded, 7)[0], run(eager, 7)[0])
    loaded.load_state_dict(model.state_dict())


def test_compiling_a_compiled_module_again_takes_the_new_options() -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    assert fgc.compile(body, **{**OPTIONS, "buckets": [4, 32]}) is module
    check_replayed(body, eager, 3, 30)
    assert fgc.report(body).buckets == (4, 32)
    fgc.close(body)
    assert "forward" not in module.__dict__


def test_b99_the_same_options_compile_nothing_anew() -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("torch.compile", module)
    compiles = fgc.report(body).compiles
    again = compiled("torch.compile", module)
    check_replayed(again, eager, 7, 12)
    assert fgc.report(body).compiles == compiles
    other = compiled("torch.compile", module, buckets=[32])
    run(other, 5), run(other, 6)
    check(other, eager, 7)
    assert fgc.report(other).replays[32] >= 1


class Pair(nn.Module):
    """Two bodies on one model, the second on what the first returns, with one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = T2(layers=1), T2(layers=1)
        self.two.embed = self.one.embed

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.one(input_ids, position_ids) + 2 * self.two(input_ids, position_ids)


@both_ways
def test_two_bodies_on_one_model(way: str) -> None:
    pair = Pair().eval()
    eager = copy.deepcopy(pair)
    if way == "compile":
        for part in (pair.one, pair.two):
            fgc.compile(part, **OPTIONS)
    else:
        pair.one, pair.two = (compiled(way, part) for part in (pair.one, pair.two))
    with torch.no_grad():
        for n in (5, 6, 7, 12, 3):
            args = tokens(n, seed=n)[None], torch.arange(n)[None]
            equal(pair(*args), eager(*args))
    # Of ten calls: one for each body as traced, and one that finds the other body's weights and captures for them.
    assert sum(fgc.report(pair).replays.values()) >= 7


def test_a_compiled_body_inside_of_a_compiled_model() -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    fgc.compile(model.model, **OPTIONS)
    run(model.model, 5)
    fgc.compile(model, **OPTIONS)
    for n in (7, 12, 3):
        equal(run(model, n).logits, run(eager, n).logits)
        equal(run(model.model, n)[0], run(eager.model, n)[0])
