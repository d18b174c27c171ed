"""Prefill over a paged KV cache: prefixes, chunks, shared pages, decode steps; equal to the whole text in one call."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fullgraph_compile as fgc
from fullgraph_compile.staging import Poison
from tests.models import tiny
from tests.paged.engine import Engine, cache_for, compiled, counted, model, since, texts

POISONS = [None, Poison.IMPOSSIBLE, Poison.PLAUSIBLE]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Gemma2"])
def test_uneven_chunks_equal_one_shot(name: str, poison: Poison | None, shared: Callable[..., nn.Module]) -> None:
    body = shared(name, poison)
    before = counted(body)
    engine = Engine(body, cache_for(body), texts(37, 50, 9))
    engine.step({0: 7, 1: 20})
    engine.step({0: 1, 1: 1, 2: 5})
    engine.step({2: 4})
    engine.step({1: 29, 0: 29})
    engine.check(model(name))
    replays, fallbacks = since(body, before)
    assert replays.total() == 4 and not fallbacks


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_pages_of_any_size(page_size: int, shared: Callable[..., nn.Module]) -> None:
    body = shared("Llama")
    before = counted(body)
    engine = Engine(body, cache_for(body, 2 + 3 * -(-40 // page_size), page_size), texts(33, 21))
    engine.step({0: 10, 1: 4})
    engine.step({1: 17, 0: 23})
    engine.check(tiny("Llama"))
    assert not since(body, before)[1]


def test_keys_and_values_equal_those_of_eager(shared: Callable[..., nn.Module]) -> None:
    body, eager = shared("Qwen3"), tiny("Qwen3")
    engine = Engine(body, cache_for(body), texts(23))
    engine.step({0: 9})
    engine.step({0: 14})
    with torch.inference_mode():
        kept = eager(input_ids=engine.texts[0][None], use_cache=True).past_key_values
    at = torch.tensor(engine.pages[0])
    for i, layer in enumerate(kept.layers):
        for pool, want in ((engine.cache.k[i], layer.keys), (engine.cache.v[i], layer.values)):
            torch.testing.assert_close(pool[at].flatten(0, 1)[:23], want[0].transpose(0, 1), atol=1e-5, rtol=1e-4)


def test_decode_steps_ride_the_same_graphs(shared: Callable[..., nn.Module]) -> None:
    body, eager = shared("Llama"), tiny("Llama")
    before = counted(body)
    engine = Engine(body, cache_for(body), texts(30, 18))
    engine.step({0: 22, 1: 10})
    for _ in range(8):
        engine.step({0: 1, 1: 1})
    engine.check(eager)
    assert since(body, before)[0] == {8: 8, 32: 1}, "eight decode steps after one chunk"


def test_a_shared_prefix_is_read_and_not_written(shared: Callable[..., nn.Module]) -> None:
    body, eager = shared("Llama"), tiny("Llama")
    cache = cache_for(body)
    prefix, one, two = texts(16, 7, 12)
    engine = Engine(body, cache, [prefix, torch.cat([prefix, one]), torch.cat([prefix, two])])
    engine.step({0: 16})
    kept = [t.clone() for t in (*cache.k, *cache.v)]
    held = list(engine.pages[0])
    for r in (1, 2):
        engine.pages[r], engine.done[r] = cache.share(engine.pages[0], 16), 16
        engine.hidden[r] = [engine.hidden[0][0]]
    engine.step({1: 7, 2: 5})
    engine.step({2: 7})
    engine.check(eager)
    for before, after in zip(kept, (*cache.k, *cache.v), strict=True):
        assert torch.equal(before[held], after[held])
    for pages in engine.pages:
        cache.free(pages)
    assert cache.free_pages == cache.pages - 1


@pytest.mark.parametrize("poison", POISONS)
def test_b35_random_splits_and_prefixes(poison: Poison | None, shared: Callable[..., nn.Module]) -> None:
    rng = random.Random(7)
    body, eager = shared("Mistral", poison), tiny("Mistral")
    before = counted(body)
    engine = Engine(body, cache_for(body, pages=120), texts(*[60] * 8))
    for _ in range(30):
        left = [r for r in range(8) if engine.done[r] < 60]
        some = rng.sample(left, min(len(left), rng.randint(1, 4)))
        engine.step({r: rng.randint(1, min(12, 60 - engine.done[r])) for r in some})
    engine.check(eager)
    assert not since(body, before)[1]


@pytest.mark.parametrize("poison", POISONS)
def test_b11_b15_only_slots_of_the_batch_change(poison: Poison | None, shared: Callable[..., nn.Module]) -> None:
    body = shared("Llama", poison)
    cache = cache_for(body, pages=16)
    other = cache.allocate(4)
    engine = Engine(body, cache, texts(40))
    engine.step({0: 1})  # captures: nothing of the cache is written by it
    for pool in (*cache.k, *cache.v):
        pool.fill_(7.0)
        pool[0] = 0.0
    for n in (5, 1, 3, 20, 2):
        engine.step({0: n})
    written = torch.tensor(engine.pages[0])
    for pool in (*cache.k, *cache.v):
        rows = pool.flatten(0, 1)
        mine = (written[:, None] * 4 + torch.arange(4)).flatten()[1:32]
        others = torch.ones(len(rows), dtype=torch.bool)
        others[mine] = False
        others[:4] = False
        assert (rows[others] == 7.0).all() and (rows[mine] != 7.0).all()
        assert (pool[0] == 0.0).all(), "the reserved page stays zero"
    assert other == [1]


def test_capturing_writes_nothing_to_a_cache() -> None:
    body = compiled(tiny("Llama"))
    cache = cache_for(body)
    for pool in (*cache.k, *cache.v):
        pool[1:].fill_(7.0)
    engine = Engine(body, cache, texts(3))
    engine.step({0: 3})
    for pool in (*cache.k, *cache.v):
        assert (pool.flatten(0, 1)[4 + 3 :] == 7.0).all() and (pool[0] == 0.0).all()


def test_b36_rows_of_the_page_table_keep_one_stride() -> None:
    body, eager = compiled(tiny("Llama")), tiny("Llama")
    engine = Engine(body, cache_for(body), texts(5, 4, 6))
    engine.step({0: 5, 1: 4, 2: 6})
    engine.check(eager)
    (graph,) = body.forward.graphs()
    tables = {b.static.page_table.stride() for b in graph.runner.buckets.values()}
    assert tables == {(63, 1)}, "the longest request may hold all pages"


def test_b27_short_keys_then_long_ones_and_back(shared: Callable[..., nn.Module]) -> None:
    body, eager = shared("Llama"), tiny("Llama")
    engine = Engine(body, cache_for(body), texts(48, 8, 48))
    engine.step({0: 40})
    engine.step({1: 4})
    engine.step({0: 4})  # 44 keys in the bucket that has just had 4
    engine.step({1: 4})
    engine.step({2: 48})
    engine.check(eager)


def test_b76_b100_another_cache_is_noticed(shared: Callable[..., nn.Module]) -> None:
    body, eager = shared("Llama"), tiny("Llama")
    compiles = fgc.report(body).compiles
    engines = [Engine(body, cache_for(body), texts(20, 11)) for _ in range(2)]
    for n in (4, 7):
        for engine in engines:
            engine.step({0: n, 1: 3})
    for engine in engines:
        engine.check(eager)
    assert fgc.report(body).compiles == compiles
    before = [t.clone() for t in engines[0].cache.k]
    engines[1].step({0: 5})
    assert all(map(torch.equal, before, engines[0].cache.k))


def test_over_the_ladder_runs_compiled_over_the_same_cache() -> None:
    body, eager = compiled(tiny("Llama"), max_tokens=16), tiny("Llama")
    engine = Engine(body, cache_for(body), texts(60, 30))
    engine.step({0: 30})
    engine.step({0: 8, 1: 3})
    engine.step({1: 27})
    engine.check(eager)
    assert fgc.report(body).fallbacks == {fgc.Reason.OVER_LADDER: 2}


def test_requests_without_new_tokens_keep_their_pages(shared: Callable[..., nn.Module]) -> None:
    body, eager = shared("Llama"), tiny("Llama")
    engine = Engine(body, cache_for(body), texts(12, 9, 10))
    engine.step({0: 6, 1: 0, 2: 4})
    engine.step({0: 0, 1: 9, 2: 6})
    engine.step({0: 6, 1: 0})
    engine.check(eager)


def test_the_limit_of_a_request_is_that_of_the_cache() -> None:
    body, eager = compiled(tiny("Llama"), max_tokens=16), tiny("Llama")
    engine = Engine(body, cache_for(body, pages=21), texts(80))
    for _ in range(5):
        engine.step({0: 16})
    engine.check(eager)
    assert fgc.report(body).replays[16] == 5
    given = compiled(tiny("Llama"), max_tokens=16, context_length=40)
    engine = Engine(given, cache_for(given, pages=21), texts(80))
    for _ in range(3):
        engine.step({0: 16})
    engine.check(eager)
    assert fgc.report(given).fallbacks == {fgc.Reason.OVER_CONTEXT: 1}
