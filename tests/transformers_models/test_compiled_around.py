"""``torch.compile`` around a module that ``fgc.compile`` compiled: it gets the module's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from tests.transformers_models.whole import close, padded, pair

IDS = padded([17])["input_ids"]
MODELS = [("Qwen3", "Model"), ("Qwen3", "ForCausalLM"), ("Bert", "Model")]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(name: str, kind: str) -> tuple[nn.Module, Tensor]:
    """A compiled model and what it gives for ``IDS``."""
    model, eager = pair(name, kind)
    with torch.no_grad():
        return model, eager(input_ids=IDS)[0]


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("name", "kind"), MODELS)
def test_an_outer_trace_holds_the_modules_own_forward(name: str, kind: str, mode: Any, called_before: bool) -> None:
    model, want = compiled(name, kind)
    around = torch.compile(lambda ids: model(input_ids=ids)[0] * 1, backend="eager", fullgraph=True)
    with mode():
        if called_before:
            model(input_ids=IDS)
        for _ in range(2):
            close(around(IDS), want)
        close(model(input_ids=IDS)[0], want)
    assert sum(fgc.report(model).replays.values()) == 1 + called_before
    assert not fgc.report(model).fallbacks


@pytest.mark.parametrize(("name", "kind"), MODELS)
def test_the_module_itself_may_be_compiled_once_more(name: str, kind: str) -> None:
    model, want = compiled(name, kind)
    around: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        model(input_ids=IDS)
        close(around(input_ids=IDS)[0], want)
        close(model(input_ids=IDS)[0], want)
    assert sum(fgc.report(model).replays.values()) == 2


def test_what_dynamo_leaves_to_python_is_right_too() -> None:
    """After a graph break, and past the limit of recompiles, Python makes the call while Dynamo watches its frames."""
    models = [compiled("Qwen3", "Model"), compiled("Qwen3", "ForCausalLM"), compiled("Bert", "Model")]

    def broken(i: int, times: int, tokens: int) -> Tensor:
        torch._dynamo.graph_break()
        try:
            torch._dynamo.graph_break()
            return models[i][0](input_ids=IDS[:, :tokens])[0] * times
        finally:
            torch._dynamo.graph_break()

    around = torch.compile(broken, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        for times in (1, 2, 3):
            for i, (model, want) in enumerate(models):
                close(around(i, times, 17), want * times)
                if i != 2:
                    close(around(i, times, 9), want[:, :9] * times)
                close(model(input_ids=IDS)[0], want)
    for model, _ in models:
        assert sum(fgc.report(model).replays.values()) >= 3 and not fgc.report(model).fallbacks


@pytest.mark.parametrize("called_before", [False, True])
def test_a_forward_that_breaks_the_outer_graph_runs_as_it_is(called_before: bool) -> None:
    """Dynamo leaves the frame that calls it to Python, and would trace what serves the call next."""
    model, want = compiled("Qwen3", "Model")
    attention: Any = model.layers[0].self_attn

    def broken(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return type(attention).forward(attention, *args, **kwargs)

    around: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        if called_before:
            close(model(input_ids=IDS)[0], want)
        attention.forward = broken
        close(around(input_ids=IDS)[0], want)
        del attention.forward
        close(model(input_ids=IDS)[0], want)
    assert sum(fgc.report(model).replays.values()) == 1 + called_before and not fgc.report(model).fallbacks
