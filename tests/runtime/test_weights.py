"""Weights, dtypes and hooks that change after the first call are followed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from fullgraph_compile.registry import unwrap
from tests.models import tiny_causal_lm
from tests.runtime.bodies import both_ways, check, check_replayed, equal, ready, run, small


def in_place(m: Any) -> None:
    with torch.no_grad():
        m.layers[0].out.weight.mul_(-2)
        m.embed.weight.add_(0.25)


def data_swap(m: Any) -> None:
    m.layers[0].out.weight.data = m.layers[0].out.weight.data * -2


def assigned_state(m: Any) -> None:
    m.load_state_dict({k: v * -1.5 for k, v in m.state_dict().items()}, assign=True)


def copied_state(m: Any) -> None:
    m.load_state_dict({k: v * -1.5 for k, v in m.state_dict().items()})


def other_parameter(m: Any) -> None:
    m.layers[0].out.weight = nn.Parameter(m.layers[0].out.weight.detach() * -2)


def other_layer(m: Any) -> None:
    layer = copy.deepcopy(m.layers[0])
    with torch.no_grad():
        layer.out.weight.mul_(-2)
    m.layers[0] = layer


def other_module_inside(m: Any) -> None:
    m.layers[0].mlp = nn.Identity()


# Those that leave the traced graph as it is go one after the other over one body.
IN_PLACE = [in_place, data_swap, assigned_state, copied_state, other_parameter]
CHANGES = {"weights": IN_PLACE, "other_layer": [other_layer], "other_module_inside": [other_module_inside]}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@both_ways
def test_changed_weights_are_followed_in_the_same_call(way: str, changes: list[Callable[[Any], None]]) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    check_replayed(body, eager, 7, 12)
    for change in changes:
        stale = run(eager, 7)
        change(module), change(eager)
        assert float((run(eager, 7) - stale).abs().max()) > 1e-2, change
        check(body, eager, 7, 7, 12)
        check_replayed(body, eager, 7, 12, 3)
        gc.collect()
        torch.full((64, 64), float("nan"))
        check_replayed(body, eager, 7, 12, seed=3)


@both_ways
def test_a_moved_weight_is_counted(way: str) -> None:
    body = ready(way, small())
    data_swap(unwrap(body))
    run(body, 7)
    assert fgc.report(body).fallbacks[Reason.WEIGHTS_MOVED] == 1


@both_ways
def test_a_module_that_changes_its_dtype_is_followed(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    module.double(), eager.double()
    for n in (7, 7, 12):
        got, want = run(body, n), run(eager, n)
        assert got.dtype == torch.float64
        equal(got, want, 1e-6)


@both_ways
def test_b97_a_tied_head_follows_its_embedding(way: str) -> None:
    model = tiny_causal_lm("Llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    eager = copy.deepcopy(model)
    body = ready(way, model)
    for m in (model, eager):
        with torch.no_grad():
            m.lm_head.weight.mul_(0.5)
    check_replayed(body, eager, 7, 12)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("slot", ["the first", "the other", "both, alike", "both, apart"])
def test_weights_that_were_tied_are_followed_in_each_place(slot: str) -> None:
    module: Any = small()
    module.layers[0].mlp = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))
    module.layers[0].mlp[2].weight = module.layers[0].mlp[0].weight
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    check_replayed(body, eager, 7, 12)
    for m in (module, eager):
        first, _, other = m.layers[0].mlp
        halved, negative = (nn.Parameter(first.weight.detach() * by) for by in (0.5, -1))
        if slot != "the other":
            first.weight = halved
        if slot != "the first":
            other.weight = halved if slot == "both, alike" else negative
    check(body, eager, 7, 12)
    check_replayed(body, eager, 7, 12)


@pytest.mark.parametrize("kind", ["forward hook", "forward pre-hook"])
def test_b86_hooks_added_and_removed_after_the_first_call_take_effect(kind: str) -> None:
    """By ``fgc.compile``; under ``torch.compile`` it is Dynamo that does not look at hooks of submodules again."""
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)

    def hook(_: Any, args: Any, output: Any = None) -> Any:
        return args[0] + 1 if output is None else output + 1

    handles = []
    for m in (module, eager):
        layer: Any = m.layers[0]
        register = layer.register_forward_hook if kind == "forward hook" else layer.register_forward_pre_hook
        handles.append(register(hook))
    check(body, eager, 7, 12)
    for handle in handles:
        handle.remove()
    check(body, eager, 7, 12)
