"""A bad batch is an error that has the wrong value and what is valid, before a buffer is touched."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.batch import active_batch
from tests.good_calls import GOOD, MODELS, WAYS, call, check_good_calls, compiled, per_request, unchanged
from tests.models import tiny, tokens


def counts(body: Any) -> tuple[Counter[int], Counter[fgc.Reason], int]:
    report = fgc.report(body)
    return report.replays, report.fallbacks, report.compiles


def memory(body: Any) -> list[Tensor]:
    """Copies of all static buffers of all graphs of a body."""
    from fullgraph_compile.captured import CapturedGraph
    from fullgraph_compile.registry import compiled_for, unwrap

    copies: list[Tensor] = []
    for graph in compiled_for(unwrap(body)):
        if isinstance(graph, CapturedGraph):
            for bucket in graph.runner.buckets.values():
                copies += [t.clone() for t in (bucket.static.cu_q, *bucket.inputs.values(), *bucket.outputs)]
    return copies


def fails_and_changes_nothing(body: Any, lengths: list[int], batch: fgc.PrefillBatch, says: list[str]) -> None:
    module = getattr(body, "_orig_mod", body)
    before, held = counts(body), memory(body)
    with unchanged(module), pytest.raises(ValueError) as raised:
        call(body, lengths, batch)
    for text in says:
        assert text in str(raised.value)
    assert counts(body)[:2] == before[:2]
    now = memory(body)
    assert len(now) == len(held)
    assert all(torch.equal(a, b) for a, b in zip(now, held, strict=True))


WRONG_BATCHES: dict[str, tuple[Callable[[], fgc.PrefillBatch], list[str]]] = {
    "sum too small": (lambda: fgc.PrefillBatch([3, 4], device="cpu"), ["add up to 7", "9 tokens", "equal"]),
    "sum too large": (lambda: fgc.PrefillBatch([9, 9], device="cpu"), ["add up to 18", "9 tokens", "equal"]),
    "another device": (
        lambda: fgc.PrefillBatch([9], device="meta"),
        ["on meta", "on cpu", "device='cpu'"],
    ),
    "a GPU that is not there": (
        lambda: fgc.PrefillBatch([4, 5], device="cuda:3"),
        ["on cuda:3", "on cpu", "device='cpu'"],
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_does_not_describe_the_call_is_an_error(way: str, model: str) -> None:
    module = MODELS[model]()
    eager = copy.deepcopy(module)
    body = compiled(way, module, GOOD)
    # At the first call, which traces; then when everything is captured.
    for make, says in WRONG_BATCHES.values():
        fails_and_changes_nothing(body, [9], make(), says)
    check_good_calls(body, eager)
    for make, says in WRONG_BATCHES.values():
        fails_and_changes_nothing(body, [9], make(), says)
        torch.testing.assert_close(call(body, [4, 2]), per_request(eager, [4, 2]), rtol=1e-5, atol=2e-5)


def test_a_wrong_batch_is_an_error_outside_of_every_graph_too() -> None:
    """Over the ladder no graph is used, but the batch is read all the same."""
    for way in WAYS:
        body = compiled(way, MODELS["T2"](), GOOD)
        call(body, [9]), call(body, [7])
        with pytest.raises(ValueError, match=r"add up to 39, but the call has 40 tokens"):
            call(body, [40], fgc.PrefillBatch([20, 19], device="cpu"))


@pytest.mark.parametrize("way", WAYS)
def test_positions_of_another_length_are_an_error(way: str) -> None:
    module = tiny("Llama", num_hidden_layers=1)
    eager = copy.deepcopy(module)
    body = compiled(way, module, GOOD)
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # pytest would format every frame
    if way == "compile":
        for inside in (None, fgc.PrefillBatch([9], device="cpu")):
            with torch.no_grad(), pytest.raises(ValueError, match=r"position_ids has .*8.* 9 tokens"):
                if inside is None:
                    body(input_ids=tokens(9)[None], position_ids=torch.arange(8)[None], use_cache=False)
                else:
                    with inside:
                        body(input_ids=tokens(9)[None], position_ids=torch.arange(8)[None], use_cache=False)
    else:
        with torch.no_grad(), pytest.raises(Exception, match=r"(?s)9.*8|8.*9"):
            body(input_ids=tokens(9)[None], position_ids=torch.arange(8)[None], use_cache=False)
    check_good_calls(body, eager)


@pytest.mark.parametrize("way", WAYS)
def test_a_second_batch_entered_inside_one_is_an_error(way: str) -> None:
    module = MODELS["T2"]()
    eager = copy.deepcopy(module)
    body = compiled(way, module, GOOD)
    check_good_calls(body, eager)
    before = counts(body)
    outer, inner = fgc.PrefillBatch([4, 5], device="cpu"), fgc.PrefillBatch([9], device="cpu")
    with torch.no_grad(), outer:
        for second in (inner, outer):
            with pytest.raises(RuntimeError) as raised, second:
                pass
            assert str(raised.value).count("PrefillBatch(") == 2
            assert "4, 5" in str(raised.value)
            assert "leave the first" in str(raised.value)
        assert counts(body) == before
        # The first is still the active one.
        got = body(input_ids=tokens(9)[None], position_ids=outer.position_ids[None])[0]
    torch.testing.assert_close(got, per_request(eager, [4, 5]), rtol=1e-5, atol=2e-5)
    assert active_batch() is None
    check_good_calls(body, eager)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_left_after_an_error_inside_it(way: str) -> None:
    module = MODELS["T2"]()
    eager = copy.deepcopy(module)
    body = compiled(way, module, GOOD)
    check_good_calls(body, eager)
    batch = fgc.PrefillBatch([4, 5], device="cpu")
    with pytest.raises(ValueError, match="add up to 9, but the call has 8"):
        call(body, [8], batch)
    torch.testing.assert_close(call(body, [4, 5], batch), per_request(eager, [4, 5]), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"new_tokens": []}, ValueError, "at least one"),
        ({"new_tokens": [3, -1]}, ValueError, "holds -1.*0 or more"),
        ({"new_tokens": [3, 2.5]}, TypeError, "2.5.*not an integer"),
        ({"new_tokens": [3], "cached_tokens": [4]}, ValueError, r"cached_tokens=\[4\].*or 0 for each"),
        ({"new_tokens": [3], "cached_tokens": [0, 0]}, ValueError, "2 entries.*has 1"),
    ],
)
def test_a_bad_batch_is_an_error_when_it_is_made(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fgc.PrefillBatch(**given, device="cpu")


# -- asking ------------------------------------------------------------------------------------------------------------


def test_warmup_without_arguments_says_what_it_needs() -> None:
    body = fgc.compile(MODELS["T2"](), **GOOD)
    with pytest.raises(TypeError, match=r"T2 is called.*warmup\(body, input_ids"):
        fgc.warmup(body)
    assert fgc.warmup(body, input_ids=tokens(5)[None], position_ids=torch.arange(5)[None]).ready


@pytest.mark.parametrize("way", WAYS)
def test_explain_checks_the_batch_as_the_call_does(way: str) -> None:
    body = compiled(way, MODELS["T2"](), GOOD)
    call(body, [9]), call(body, [7])
    says = "add up to 7, but the call has 9"
    with torch.no_grad(), pytest.raises(ValueError, match=says), fgc.PrefillBatch([3, 4], device="cpu"):
        fgc.explain(body, input_ids=tokens(9)[None], position_ids=torch.arange(9)[None])
