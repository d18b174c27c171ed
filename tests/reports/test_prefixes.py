"""Faults of attention over a prefix: what is planned for it, and that it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.ops import AttentionSite
from tests.models import tiny, tiny_causal_lm
from tests.paged.engine import Engine, cache_for, compiled, texts
from tests.reports.cases import known_as

FEW: dict[str, Any] = {"buckets": [8, 64]}


class Recording(ReferenceAttention):
    """Remembers what it was planned with, and what each run got as plain numbers."""

    name: ClassVar[str] = "recording"

    def __init__(self) -> None:
        self.planned: list[tuple[list[int], int, StaticBatch, list[int]]] = []
        self.ran: list[tuple[StaticBatch, int, int]] = []

    def plan(self, batch: PrefillBatch, static: StaticBatch, sites: Sequence[AttentionSite]) -> None:
        self.planned.append((batch.lengths, static.max_k, static, static.cu_q.tolist()))

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Any, slopes: Any, site: Any, static: StaticBatch) -> Tensor:
        self.ran.append((static, static.max_k, static.slots))
        return super().run(q, k, v, sinks, slopes, site, static)


# -- what attention is planned with ------------------------------------------------------------------------------------


def test_b24_b25_b30_a_plan_has_the_bound_and_the_slots_that_were_captured() -> None:
    with known_as("recording", Recording):
        body, eager = compiled(tiny("Llama"), attention="recording", context_length=60, **FEW), tiny("Llama")
    engine = Engine(body, cache_for(body), texts(60, 60, 60, 60))
    engine.step({0: 3})  # captured with keys as short as they come
    (graph,) = body.forward.graphs()
    backend = graph.runner.program.attention
    captured = {id(static): (max_k, slots) for static, max_k, slots in backend.ran}
    steps = [{0: 40, 1: 20}, {0: 17, 1: 1, 2: 9}, {1: 39, 2: 1, 3: 2}, {3: 1}, {2: 50}, {0: 0, 3: 3}]
    runs = len(backend.ran)
    for chunks in steps:
        backend.planned.clear()
        engine.step(chunks)
        ((lengths, max_k, static, offsets),) = backend.planned
        assert lengths == [engine.done[r] for r in chunks], "the plan is that of this batch"
        assert (max_k, len(offsets) - 1) == captured[id(static)] == (60, 4)
        assert offsets[len(chunks) :] == [sum(chunks.values())] * (5 - len(chunks))
    engine.check(eager)
    assert len(backend.ran) == runs, "a replay runs no Python"
    assert not fgc.report(body).fallbacks


# -- prefixes ----------------------------------------------------------------------------------------------------------


def test_b38_a_prefix_is_read_by_graphs_that_were_captured_without_one() -> None:
    body, eager = compiled(tiny("Llama"), **FEW), tiny("Llama")
    engine = Engine(body, cache_for(body), texts(16, 9))
    engine.step({0: 12})
    engine.step({0: 4, 1: 5})
    engine.step({1: 4})
    engine.check(eager)
    suffix = engine.texts[0][12:]
    with torch.inference_mode():
        alone = eager(input_ids=suffix[None], position_ids=torch.arange(12, 16)[None], use_cache=False)[0][0]
    assert (torch.cat(engine.hidden[0])[12:] - alone).abs().max() > 1e-2, "without the prefix it is another answer"
    assert not fgc.report(body).fallbacks


def test_b117_a_batch_gives_the_same_bits_again_and_the_same_argmax_in_any_company() -> None:
    model = tiny_causal_lm("Llama")
    body = compiled(model.model, **FEW)
    cache = cache_for(body)

    def last_logits(lengths: dict[int, int]) -> Tensor:
        engine = Engine(body, cache, texts(30, 20, 9))
        engine.step(dict.fromkeys(lengths, 5))
        engine.step({r: n - 5 for r, n in lengths.items()})
        for pages in engine.pages:
            cache.free(pages)
        with torch.inference_mode():
            return model.lm_head(engine.hidden[0][-1][-1])

    once = last_logits({0: 30, 1: 20})
    assert all(torch.equal(last_logits({0: 30, 1: 20}), once) for _ in range(10))
    for company in ({0: 30}, {0: 30, 2: 9}, {0: 30, 1: 20, 2: 9}):
        other = last_logits(company)
        torch.testing.assert_close(other, once, rtol=1e-4, atol=1e-4)
        assert other.argmax() == once.argmax()
