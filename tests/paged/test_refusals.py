"""What a paged KV cache cannot be used for is refused before any kernel sees it, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from tests.models import tiny
from tests.paged.engine import Engine, cache_for, compiled, texts


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
