"""Memory that was freed where a graph has kept the address, and memory that piles up."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.compiled_body import compiled_body
from tests.models import T2, tiny, tokens
from tests.paged.engine import Engine, cache_for, texts
from tests.reports.cases import TAPE, equal, packed, pair, per_request

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


# -- freed and reused --------------------------------------------------------------------------------------------------


def test_b64_what_graphs_read_is_held_while_other_memory_comes_and_goes() -> None:
    rng = random.Random(0)
    body, eager = fgc.compile(tiny("Llama"), **OPTIONS, context_length=80), tiny("Llama")
    cache = cache_for(body, pages=130)
    engine = Engine(body, cache, texts(*[80] * 6))
    engine.step({0: 2})
    (graph,) = body.forward.graphs()
    held = [t.data_ptr() for t in statics(graph)]
    addresses = cache.addresses()
    gc.collect()
    for _ in range(50):
        garbage = churn(rng)
        room = [r for r in range(6) if engine.done[r] < 80]
        some = rng.sample(room, min(len(room), rng.randint(1, 3)))
        engine.step({r: rng.randint(1, min(9, 80 - engine.done[r])) for r in some})
        del garbage
    engine.check(eager)
    assert [t.data_ptr() for t in statics(graph)] == held
    assert cache.addresses() == addresses and not fgc.report(body).fallbacks


def test_b64_a_cache_that_its_owner_dropped_is_held_by_the_graphs_over_it() -> None:
    body = fgc.compile(tiny("Llama"), **OPTIONS)
    cache = cache_for(body)
    Engine(body, cache, texts(5)).step({0: 5})
    pool = weakref.ref(cache.k[0])
    del cache
    gc.collect()
    assert pool() is not None, "its memory cannot become another cache's while a graph has the address"


def test_b73_release_lets_go_of_a_cache_that_its_owner_dropped() -> None:
    body = fgc.compile(tiny("Llama"), **OPTIONS)
    cache = cache_for(body)
    Engine(body, cache, texts(5)).step({0: 5})
    pool = weakref.ref(cache.k[0])
    del cache
    fgc.release(body)
    gc.collect()
    assert pool() is None


def test_b75_any_lengths_take_one_compile_and_one_capture_of_each_bucket() -> None:
    rng = random.Random(1)
    t2 = pair(T2(), **OPTIONS)
    recorded = {id(b.graph) for b in t2.graph.runner.buckets.values()}
    for i in range(500):
        cut = sorted(rng.randint(0, 32) for _ in range(rng.randint(0, 3)))
        total = rng.randint(max([1, *cut]), 32)
        lengths = [b - a for a, b in zip([0, *cut], [*cut, total], strict=True)]
        got = packed(t2.body, tokens(total, seed=i), lengths)
        if i % 50 == 0:
            equal(got, per_request(t2.eager, tokens(total, seed=i), lengths))
    assert t2.report.compiles == 1
    assert {id(b.graph) for b in t2.graph.runner.buckets.values()} == recorded and len(recorded) == 4
    assert sum((t2.report.replays + t2.report.fallbacks).values()) == 500
    assert set(t2.report.fallbacks) <= {fgc.Reason.PADDING}


# -- models that are gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("close", [True, False])
def test_a_model_that_is_gone_keeps_neither_weights_nor_graphs(close: bool) -> None:
    """Dynamo keeps what it traced, and the backend that it called, for as long as the process lives."""
    body: Any = tiny("Llama", num_hidden_layers=1)
    fgc.compile(body, **OPTIONS)
    with torch.no_grad():
        results = [body(input_ids=tokens(n)[None], use_cache=False)[0] for n in (5, 9)]
    compiled = compiled_body(body)
    assert compiled is not None and fgc.report(body).replays.total() == 2
    runner, weight = compiled.graphs()[0].runner, body.layers[0].mlp.down_proj.weight
    gone = [weakref.ref(x) for x in (body, weight, compiled, runner, results[0])]
    if close:
        fgc.close(body)
    del body, compiled, runner, weight, results
    gc.collect()
    assert [x() for x in gone] == [None] * len(gone)
