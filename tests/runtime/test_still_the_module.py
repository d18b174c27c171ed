"""The module is still the module: copied, saved, compiled again, and beside or inside of another."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fullgraph_compile as fgc
from tests.models import T2, tiny_causal_lm, tokens
from tests.runtime.bodies import (
    OPTIONS,
    both_ways,
    check,
    check_replayed,
    compiled,
    equal,
    first,
    ready,
    replays,
    run,
    small,
)


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


def first_twice(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return (type(module).forward(module, *args, **kwargs)[0] * 2,)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("of", ["body", "model"])
def test_a_copy_keeps_a_forward_that_the_module_itself_was_given(of: str, how: str) -> None:
    """As accelerate's hooks do."""
    whole = tiny_causal_lm("Llama")
    module: nn.Module = whole.model if of == "body" else whole
    inputs = {"input_ids": tokens(7)[None], "use_cache": False, "return_dict": False}
    module.forward = functools.partial(first_twice, module)
    with torch.no_grad():
        want = module(**inputs)[0]
        fgc.compile(module, **OPTIONS)
        copied = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
        assert copied.forward.args == (copied,)
        equal(copied(**inputs)[0], want)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("make", [small, lambda: tiny_causal_lm("Llama")])
def test_a_compiled_module_can_be_exported(make: Callable[[], nn.Module], called: bool, strict: bool) -> None:
    module = make()
    eager = copy.deepcopy(module)
    body = fgc.compile(module, **OPTIONS)
    inputs = {"input_ids": tokens(7)[None], "position_ids": torch.arange(7)[None]}
    inputs |= {} if isinstance(module, T2) else {"use_cache": False}
    if called:
        run(body, 7)
    before = replays(body)
    with torch.no_grad():
        exported = torch.export.export(module, (), inputs, strict=strict).module()
        equal(first(exported(**inputs)), first(eager(**inputs)))
    assert replays(body) == before


def test_a_compiled_module_whose_forward_was_wrapped_can_be_exported() -> None:
    module = small()
    module.forward = functools.partial(type(module).forward, module)
    inputs = {"input_ids": tokens(7)[None], "position_ids": torch.arange(7)[None]}
    with torch.no_grad():
        want = module(**inputs)
        fgc.compile(module, **OPTIONS)
        equal(torch.export.export(module, (), inputs).module()(**inputs), want)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_records_the_module_and_nothing_of_ours(pre_dispatch: bool) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    example = tokens(7)[None], torch.arange(7)[None]
    with torch.no_grad():
        graph = make_fx(lambda ids, positions: body(ids, positions), pre_dispatch=pre_dispatch)(*example)
        plain = make_fx(lambda ids, positions: eager(ids, positions), pre_dispatch=pre_dispatch)(*example)
        assert [n.target for n in graph.graph.nodes] == [n.target for n in plain.graph.nodes]
        other = tokens(7, 2)[None], torch.arange(7)[None]
        equal(graph(*other), eager(*other))
    assert fgc.report(body).fallbacks == {fgc.Reason.INTERPOSED: 1}
    check_replayed(body, eager, 7)


def test_a_model_without_memory_gives_its_shape() -> None:
    module = small().to("meta")
    body = fgc.compile(module, **{**OPTIONS, "graphs": "auto"})
    ids = torch.empty(1, 7, dtype=torch.long, device="meta")
    with torch.no_grad():
        assert body(ids, ids).shape == (1, 7, 32)


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
