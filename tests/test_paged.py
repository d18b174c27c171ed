"""Prefill over a paged KV cache: prefixes, chunks, shared pages, decode steps; equal to the whole text in one call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile.staging import Poison
from tests.models import VOCABULARY, tiny

POISONS = [None, Poison.IMPOSSIBLE, Poison.PLAUSIBLE]


@pytest.fixture(autouse=True)
def clean_dynamo() -> None:
    """Nothing is cleaned between tests: Dynamo, whose guards a shared body asks, is cleaned before the first."""
    torch.set_grad_enabled(True)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def shared() -> Callable[..., nn.Module]:
    """One compiled body of each model, for tests that leave it as it is; each brings a cache, and so its captures."""
    torch._dynamo.reset()
    made: dict[str, nn.Module] = {}

    def body(name: str, poison: Poison | None = None) -> nn.Module:
        if name not in made:
            made[name] = compiled(model(name))
        for graph in made[name].forward.graphs():
            graph.runner.poison = poison
        return made[name]

    return body


def model(name: str) -> nn.Module:
    # Gemma 2's soft cap is in its eager attention only.
    return tiny(name, **({"attn_implementation": "eager"} if name == "Gemma2" else {}))


Counts = tuple[Counter[int], Counter[fgc.Reason]]


def counted(body: nn.Module) -> Counts:
    """How often each bucket was replayed so far, and each reason met."""
    report = fgc.report(body)
    return report.replays.copy(), report.fallbacks.copy()


def since(
    body: nn.Module, before: tuple[Counter[int], Counter[fgc.Reason]]
) -> tuple[Counter[int], Counter[fgc.Reason]]:
    replays, fallbacks = counted(body)
    return replays - before[0], fallbacks - before[1]


def compiled(module: nn.Module, poison: Poison | None = None, **options: Any) -> nn.Module:
    options = {"max_tokens": 64, "request_slots": 4, "graphs": "tape", "compiler": "eager", **options}
    body = fgc.compile(module, **options)
    with torch.inference_mode():
        body(input_ids=torch.arange(3)[None], use_cache=False)
    if poison is not None:
        for graph in body.forward.graphs():
            graph.runner.poison = poison
    return body


def one_shot(module: nn.Module, text: Tensor) -> Tensor:
    with torch.inference_mode():
        return module(input_ids=text[None], use_cache=False)[0][0]


class Engine:
    """Requests that grow by chunks over one cache."""

    def __init__(self, body: nn.Module, cache: fgc.PagedKVCache, texts: list[Tensor]) -> None:
        self.body, self.cache, self.texts = body, cache, texts
        self.pages: list[list[int]] = [[] for _ in texts]
        self.done = [0] * len(texts)
        self.hidden: list[list[Tensor]] = [[] for _ in texts]

    def step(self, chunks: dict[int, int]) -> None:
        """Prefill so many further tokens of each request, in one call."""
        for r, n in chunks.items():
            self.cache.append(self.pages[r], self.done[r], n)
        batch = fgc.PrefillBatch(
            list(chunks.values()),
            [self.done[r] for r in chunks],
            cache=self.cache,
            pages=[self.pages[r] for r in chunks],
        )
        ids = torch.cat([self.texts[r][self.done[r] : self.done[r] + n] for r, n in chunks.items()])
        with torch.inference_mode(), batch:
            rows = self.body(input_ids=ids[None], position_ids=batch.position_ids[None], use_cache=False)[0][0]
        for (r, n), part in zip(chunks.items(), rows.split(list(chunks.values())), strict=True):
            self.hidden[r].append(part)
            self.done[r] += n

    def check(self, eager: nn.Module) -> None:
        for r, text in enumerate(self.texts):
            torch.testing.assert_close(
                torch.cat(self.hidden[r]), one_shot(eager, text[: self.done[r]]), atol=2e-5, rtol=1e-4
            )


def texts(*lengths: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(1, VOCABULARY, (n,)) for n in lengths]


def cache_for(body: nn.Module, pages: int = 64, page_size: int = 4) -> fgc.PagedKVCache:
    return fgc.PagedKVCache.for_model(body, pages=pages, page_size=page_size)


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


# -- what is refused ---------------------------------------------------------------------------------------------------


def batch_over(cache: fgc.PagedKVCache, new: list[int], cached: list[int] | None, pages: Any) -> fgc.PrefillBatch:
    return fgc.PrefillBatch(new, cached, cache=cache, pages=pages)


@pytest.mark.parametrize(
    ("new", "cached", "pages", "says"),
    [
        ([3], None, [[0]], r"pages\[0\] holds page 0; valid are 1 \.\.\. 7 \(page 0 is reserved"),
        ([3], None, [[8]], r"pages\[0\] holds page 8; valid are 1 \.\.\. 7"),
        ([3], None, [[-1]], r"holds page -1"),
        ([3], [2], [[1]], r"pages\[0\] has 1 page of 4 tokens; a request of 5 tokens needs 2"),
        ([3, 2], None, [[1]], "1 lists for 2 requests"),
        ([3, 2], None, [[1], [1]], r"pages\[0\] and pages\[1\] would both write page 1"),
        ([5], None, [[1, 1]], "page 1 twice"),
    ],
)
def test_pages_that_no_kernel_may_see_are_refused(new: Any, cached: Any, pages: Any, says: str) -> None:
    cache = fgc.PagedKVCache([(2, 8, 8)], pages=8, page_size=4, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=says):
        batch_over(cache, new, cached, pages)


def test_a_page_that_is_not_an_integer_is_refused() -> None:
    cache = fgc.PagedKVCache([(2, 8, 8)], pages=8, page_size=4, dtype=torch.float32, device="cpu")
    with pytest.raises(TypeError, match=r"pages\[0\] holds 1.5, which is not an integer"):
        batch_over(cache, [3], None, [[1.5]])


def test_pages_without_a_cache_and_a_cache_without_pages_are_refused() -> None:
    cache = fgc.PagedKVCache([(2, 8, 8)], pages=8, page_size=4, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="pages is given without cache"):
        fgc.PrefillBatch([3], pages=[[1]])
    with pytest.raises(ValueError, match="cache is given without pages"):
        fgc.PrefillBatch([3], cache=cache)


def test_a_freed_page_and_a_shared_page_that_would_be_written_are_refused() -> None:
    cache = fgc.PagedKVCache([(2, 8, 8)], pages=8, page_size=4, dtype=torch.float32, device="cpu")
    pages = cache.allocate(8)
    shared = cache.share(pages, 8)
    with pytest.raises(ValueError, match=r"would write token 5 and those after it to page 2, which 2 lists share"):
        batch_over(cache, [2], [5], [pages])
    cache.free(shared)
    batch_over(cache, [2], [5], [pages])
    cache.free(pages)
    with pytest.raises(ValueError, match="page 1, which is not in use"):
        batch_over(cache, [2], [5], [pages])


def test_a_cache_of_other_sites_is_refused_before_anything_runs(shared: Callable[..., nn.Module]) -> None:
    body = shared("Llama")
    other = fgc.PagedKVCache([(1, 8, 8)] * 2, pages=8, page_size=4, dtype=torch.float32, device="cpu")
    engine = Engine(body, other, texts(4))
    with pytest.raises(ValueError, match=r"site 0 \(.*self_attn\) keeps 2 KV heads of 8, the cache has 1 KV heads"):
        engine.step({0: 4})
    assert all((t == 0).all() for t in (*other.k, *other.v))


class Unpaged(fgc.attention.ReferenceAttention):
    name, paged = "unpaged", False


def test_attention_that_reads_no_pages_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fgc.attention._backends, "unpaged", Unpaged)
    body = compiled(tiny("Llama"), attention="unpaged")
    engine = Engine(body, cache_for(body), texts(4))
    with pytest.raises(ValueError, match="attention='unpaged' cannot use this KV cache: it reads no KV cache"):
        engine.step({0: 4})


def test_a_body_with_positions_of_its_own_cannot_go_on_after_a_prefix() -> None:
    class OwnPositions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tiny("Llama")

        def forward(self, input_ids: Tensor) -> Tensor:
            positions = torch.arange(input_ids.shape[-1], device=input_ids.device)[None]
            return self.body(input_ids=input_ids, position_ids=positions, use_cache=False)[0]

    body = torch.compile(OwnPositions().eval(), backend="full_prefill", options={
        "max_tokens": 32, "graphs": "tape", "compiler": "eager"})  # fmt: skip
    ids = torch.arange(1, 9)[None]
    torch._dynamo.mark_dynamic(ids, 1)
    with torch.inference_mode():
        body(ids)
        cache = fgc.PagedKVCache.for_model(body, pages=8, page_size=4)
        with fgc.PrefillBatch([8], [0], cache=cache, pages=[[1, 2]]):
            body(ids)
        with (
            fgc.PrefillBatch([4], [8], cache=cache, pages=[[1, 2, 3]]),
            pytest.raises(ValueError, match="position_ids="),
        ):
            body(ids[:, :4])


def test_no_call_outside_of_a_compiled_body_ignores_a_cache(shared: Callable[..., nn.Module]) -> None:
    cache = fgc.PagedKVCache([(2, 8, 8)] * 2, pages=8, page_size=4, dtype=torch.float32, device="cpu")
    batch = fgc.PrefillBatch([4], cache=cache, pages=[[1]])
    ids = torch.arange(1, 5)[None]
    body = shared("Llama")
    with batch, pytest.raises(fgc.FallbackError, match="cannot be called with"):
        body(input_ids=ids, position_ids=batch.position_ids[None], use_cache=False)  # gradients are enabled
    plain = torch.compile(tiny("Llama"), backend="full_prefill", options={"graphs": "tape", "compiler": "eager"})
    with torch.inference_mode(), batch, pytest.raises(ValueError, match="has a KV cache, but this call was traced for"):
        plain(input_ids=ids, position_ids=batch.position_ids[None], use_cache=False)
