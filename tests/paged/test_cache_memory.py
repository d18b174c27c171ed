"""Graphs keep the memory of a KV cache: other memory is another capture, another object over the same is none."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.capture import CaptureSet
from tests.models import tiny, tokens
from tests.runtime.bodies import ready

TEXT = tokens(12)


def steps(body: torch.nn.Module, pages: list[int]) -> Callable[[fgc.PagedKVCache, int, int], Tensor]:
    def step(cache: fgc.PagedKVCache, start: int, new: int) -> Tensor:
        batch = fgc.PrefillBatch([new], [start], cache=cache, pages=[pages])
        ids, positions = TEXT[None, start : start + new], batch.position_ids[None]
        with torch.inference_mode(), batch:
            rows: Tensor = body(input_ids=ids, position_ids=positions, use_cache=False)[0][0]
        return rows

    return step


def test_weights_come_back_to_a_cache_that_has_moved() -> None:
    eager = tiny("Llama", num_hidden_layers=1)
    body = ready("compile", tiny("Llama", num_hidden_layers=1), buckets=[8], request_slots=4)
    cache = fgc.PagedKVCache.for_model(body, pages=16, page_size=4)
    step = steps(body, cache.allocate(12))
    with torch.inference_mode():
        want = eager(input_ids=TEXT[None, :9], use_cache=False)[0][0]

    def check() -> None:
        torch.testing.assert_close(torch.cat([step(cache, 0, 5), step(cache, 5, 4)]), want, rtol=1e-4, atol=1e-4)

    weights = list(body.parameters())
    ours, others = [w.data for w in weights], [w.data.clone() for w in weights]
    check()
    old = (*cache.k, *cache.v)
    for weight, data in zip(weights, others, strict=True):
        weight.data = data
    cache.k, cache.v = tuple(t.clone() for t in cache.k), tuple(t.clone() for t in cache.v)
    check()
    for weight, data in zip(weights, ours, strict=True):
        weight.data = data
    for tensor in old:
        tensor.fill_(7.0)  # whoever has that memory now
    check()
    assert all(bool((t == 7.0).all()) for t in old)


def test_another_object_over_the_same_memory_is_not_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[CaptureSet] = []
    plain = CaptureSet.capture
    monkeypatch.setattr(CaptureSet, "capture", lambda self, *a, **k: captured.append(self) or plain(self, *a, **k))
    body = ready("compile", tiny("Llama", num_hidden_layers=1), buckets=[8], request_slots=4)
    cache = fgc.PagedKVCache.for_model(body, pages=16, page_size=4)
    step = steps(body, cache.allocate(12))
    step(cache, 0, 5)
    before = len(captured)
    for _ in range(4):
        step(copy.copy(cache), 0, 5)
    assert len(captured) == before
