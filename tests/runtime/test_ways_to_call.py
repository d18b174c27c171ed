"""Ways to call a body: arguments, layouts, precisions, training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
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
    small,
)


@both_ways
def test_arguments_by_position(way: str) -> None:
    module, plain = llama(), small()
    eager, plain_eager = copy.deepcopy(module), copy.deepcopy(plain)
    body, plain_body = ready(way, module), ready(way, plain)
    before = replays(body), replays(plain_body)
    for n in (7, 6, 5):  # for Dynamo it is another form of the call, which begins with a graph of one size
        ids, positions = tokens(n)[None], torch.arange(n)[None]
        with torch.no_grad():
            equal(body(ids, None, positions, use_cache=False)[0], eager(ids, None, positions, use_cache=False)[0])
            equal(plain_body(ids, positions), plain_eager(ids, positions))
    assert replays(body) >= before[0] + 2
    assert replays(plain_body) >= before[1] + 2


RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])


@pytest.mark.parametrize("model", ["T2", "Llama"])
@both_ways
def test_restarting_positions_mean_what_the_module_takes_them_for(way: str, model: str) -> None:
    """transformers tells packed requests by them; a module of one's own knows one request."""
    ids = tokens(7)[None]
    module = llama() if model == "Llama" else small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    for by_name in (True, False):
        args = (ids,) if by_name else (ids, None, RESTARTING) if model == "Llama" else (ids, RESTARTING)
        named: dict[str, Any] = {"position_ids": RESTARTING} if by_name else {}
        if model == "Llama":
            named["use_cache"] = False
        with torch.no_grad():
            equal(first(body(*args, **named)), first(eager(*args, **named)))


@both_ways
def test_embeddings_in_place_of_ids(way: str) -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    for n in (5, 6, 7, 12):
        x, positions = torch.randn(1, n, 32), torch.arange(n)[None]
        with torch.no_grad():
            got = body(inputs_embeds=x, position_ids=positions, use_cache=False)[0]
            equal(got, eager(inputs_embeds=x, position_ids=positions, use_cache=False)[0])
        check(body, eager, n)
    assert replays(body) >= 7
    with torch.no_grad(), pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        eager(input_ids=tokens(5)[None], inputs_embeds=torch.randn(1, 5, 32), use_cache=False)
    with torch.no_grad(), pytest.raises(Exception, match="exactly one of input_ids or inputs_embeds"):
        body(input_ids=tokens(5)[None], inputs_embeds=torch.randn(1, 5, 32), use_cache=False)


@both_ways
def test_b79_inputs_of_any_layout(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    wide = torch.stack([tokens(14), tokens(14, 2)])
    shared = torch.arange(1, 15)
    pairs = [
        (wide[1:, ::2], torch.arange(7).expand(1, 7)),
        (tokens(7)[None].int(), torch.arange(7)[None].int()),
        (shared[None, 3:10], shared[None, :7]),
        (tokens(7)[:, None].t(), torch.arange(28).view(4, 7)[1:2]),
    ]
    with torch.no_grad():
        for ids, positions in pairs:
            equal(body(input_ids=ids, position_ids=positions), eager(input_ids=ids, position_ids=positions))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both_ways
def test_half_precision(way: str, dtype: torch.dtype) -> None:
    module = llama().to(dtype)
    eager = copy.deepcopy(module)
    body = ready(way, module)
    before = replays(body)
    for n in (7, 12, 3):
        equal(run(body, n)[0], run(eager, n)[0], 2e-2)
    assert replays(body) == before + 3


@both_ways
def test_b116_training_and_gradients_run_eagerly_and_eval_replays_again(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    before = replays(body)
    for m, f in ((module, body), (eager, eager)):
        out = f(input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])
        assert out.requires_grad
        out.square().sum().backward()
        assert m.layers[0].out.weight.grad is not None
    for (name, got), want in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert got.grad is not None, name
        equal(got.grad, want.grad, 1e-4)
    assert replays(body) == before
    assert fgc.report(body).fallbacks[Reason.GRAD] == 1
    module.train()
    run(body, 7)
    module.eval()
    check_replayed(body, eager, 7, 12)


def test_b116_dropout_is_live_in_training_mode_only() -> None:
    module = T2(layers=1, mlp=nn.Dropout(0.5))
    eager = copy.deepcopy(module).eval()
    body = compiled("compile", module)
    state = torch.get_rng_state()
    assert not torch.equal(run(body, 7), run(body, 7))
    assert not replays(body)
    assert fgc.report(body).fallbacks == {Reason.TRAINING: 2}
    module.eval()
    torch.set_rng_state(state)
    check_replayed(body, eager, 7, 12)
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_that_the_module_does_not_take_are_an_error_as_without_compile() -> None:
    body = ready("compile", small())
    ids, positions = tokens(5)[None], torch.arange(5)[None]
    for args, kwargs in (((ids, positions, 1), {}), ((ids,), {"input_ids": ids, "position_ids": positions})):
        with pytest.raises(TypeError, match=r"positional argument|multiple values"):
            body(*args, **kwargs)


class Summed(T2):
    """Takes any more tensors by their place."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        return super().forward(input_ids, position_ids) + sum(x.sum() for x in more) * 10


def test_arguments_without_a_name_are_not_lost() -> None:
    module = Summed(layers=1).eval()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    ids, positions = tokens(5)[None], torch.arange(5)[None]
    with torch.no_grad():
        for more in ((), (torch.ones(2),), (torch.ones(2), torch.ones(3))):
            equal(body(ids, positions, *more), eager(ids, positions, *more))
