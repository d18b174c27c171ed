"""Memory that is grown, moved or first made when a graph has been captured already."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.graphs.tape import TapeRecorder
from fullgraph_compile.ops import AttentionSite
from tests.models import T2, tiny, tokens
from tests.paged.engine import Engine, cache_for, texts
from tests.reports.cases import TAPE, equal, known_as, packed, pair, per_request

OPTIONS: dict[str, Any] = {"buckets": [4, 8, 16, 32], "request_slots": 4, **TAPE}


def churn(rng: random.Random) -> list[Tensor]:
    """Memory of many sizes, full of NaN: what was freed before is in it."""
    return [torch.full((rng.randint(1, 2048),), float("nan")) for _ in range(60)]


def statics(graph: Any) -> list[Tensor]:
    """All that graphs read or write and that is neither a weight nor their own: metadata, inputs, outputs."""
    found: list[Tensor] = []
    for bucket in graph.runner.buckets.values():
        found += [v for v in vars(bucket.static).values() if isinstance(v, Tensor)]
        found += [*bucket.inputs.values(), *bucket.outputs]
    return found


# -- grown -------------------------------------------------------------------------------------------------------------


class Growing(ReferenceAttention):
    """Has one workspace for all buckets, sized for what it was planned with; smaller buckets may need more."""

    name: ClassVar[str] = "growing"
    events: ClassVar[list[tuple[str, int]]] = []

    def __init__(self) -> None:
        self.work = torch.zeros(0)

    def plan(self, batch: PrefillBatch, static: StaticBatch, sites: Sequence[AttentionSite]) -> None:
        assert batch.tokens <= static.tokens and batch.requests <= static.slots
        assert max(batch.lengths) <= static.max_k and max(batch.new_tokens) <= static.max_q
        needed = {8: 100_000, 16: 50_000, 32: 70_000}.get(static.tokens, 0) + static.slots * static.max_k
        if len(self.work) < needed:
            self.work = torch.zeros(needed)
            self.events.append(("grows", static.tokens))
        self.events.append(("planned", static.tokens))

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Any, slopes: Any, site: Any, static: StaticBatch) -> Tensor:
        if not site.index:
            self.events.append(("ran", static.tokens))
        self.work[: q.shape[0]].fill_(1.0)
        return super().run(q * self.work[: q.shape[0], None, None], k, v, sinks, slopes, site, static)


def test_b68_b69_every_bucket_is_warmed_up_before_one_is_captured_and_nothing_grows_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, events = TapeRecorder.record, Growing.events
    events.clear()
    monkeypatch.setattr(
        TapeRecorder, "record", lambda self, run: (events.append(("captures", 0)), record(self, run))[1]
    )
    with known_as("growing", Growing):
        body = fgc.compile(tiny("Llama"), **OPTIONS | {"attention": "growing", "buckets": [8, 16, 32]})
        fgc.warmup(body)
    eager = tiny("Llama")
    cache = cache_for(body, pages=80)
    engine = Engine(body, cache, texts(90, 40, 30, 20))
    for start in ("without a cache", "over a cache"):
        if start == "over a cache":
            events.clear()
            engine.step({0: 3})
        captures = [i for i, (what, _) in enumerate(events) if what == "captures"]
        assert len(captures) == 3, start
        assert {tokens for what, tokens in events[: captures[0]] if what == "ran"} >= {8, 16, 32}
        assert "grows" not in {what for what, _ in events[captures[0] :]}
    backend = body.forward.graphs()[0].runner.program.attention
    work = backend.work
    events.clear()
    for chunks in ({0: 32}, {0: 32}, {1: 8}, {1: 10, 2: 6}, {0: 8}, {1: 20, 2: 1, 3: 2, 0: 7}):
        engine.step(chunks)
    engine.check(eager)
    assert backend.work is work
    assert {what for what, _ in events} == {"planned"}


@pytest.mark.parametrize("first", ["prefill", "other"])
def test_b71_a_second_body_leaves_the_graphs_of_the_first_whole(first: str) -> None:
    before = pair(T2(), **OPTIONS) if first == "other" else None
    body, eager = fgc.compile(tiny("Llama"), **OPTIONS), tiny("Llama")
    engine = Engine(body, cache_for(body), texts(30, 25))
    engine.step({0: 10})
    (graph,) = body.forward.graphs()
    addresses = [t.data_ptr() for t in statics(graph)]
    second = before or pair(T2(), **OPTIONS)
    for n, bucket in ((4, 4), (9, 16)):
        second.same([n], bucket=bucket)
        engine.step({0: 3, 1: n})
    engine.check(eager)
    assert [t.data_ptr() for t in statics(graph)] == addresses
    assert not fgc.report(body).fallbacks


# -- made late ---------------------------------------------------------------------------------------------------------


class Lazy(T2):
    """Makes its table of positions at its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 256)[:, None] * torch.ones(32)
        x = self.embed(input_ids) + self.table[position_ids]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def test_b77_what_a_first_forward_makes_is_not_overwritten_by_a_replay() -> None:
    rng = random.Random(2)
    eager = Lazy().eval()
    body = fgc.compile(Lazy().eval(), **OPTIONS)
    for i, lengths in enumerate(([5, 2], [12], [3], [16, 9], [5, 2])):
        ids = tokens(sum(lengths), seed=i)
        equal(packed(body, ids, lengths), per_request(eager, ids, lengths))
        table = getattr(body, "table", None)
        assert table is None or torch.equal(table, eager.table)
        assert churn(rng)
    assert sum(fgc.report(body).replays.values()) >= 3, "the graph that was traced once the table was there"
