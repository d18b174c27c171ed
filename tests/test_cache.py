"""The paged KV cache: its memory, and the geometry that it has for a model; odd ones are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fullgraph_compile.cache import PagedKVCache
from tests.attention.cases import SITE
from tests.caches import SHAPE, cache_of
from tests.models import tiny, tiny_causal_lm

# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_site_has_pages_of_its_own_geometry_full_of_zeros(page_size: int, dtype: torch.dtype) -> None:
    site = replace(SITE, kv_heads=3, head_size=24, value_head_size=16, dtype=dtype)
    rubbish = [torch.full((5, page_size, 3, 24), float("nan"), dtype=dtype) for _ in range(4)]
    del rubbish  # the allocator may give the cache these bytes
    cache = cache_of(5, page_size, [SHAPE, site], dtype)
    assert [tuple(t.shape) for t in cache.k] == [(5, page_size, 2, 8), (5, page_size, 3, 24)]
    assert [tuple(t.shape) for t in cache.v] == [(5, page_size, 2, 8), (5, page_size, 3, 16)]
    assert cache.sites == (SHAPE, (3, 24, 16)) and cache.dtype == dtype and cache.device == torch.device("cpu")
    for t in (*cache.k, *cache.v):
        assert t.dtype == dtype and t.is_contiguous() and (t == 0).all()
    assert len(set(cache.addresses())) == 4 and cache.addresses() == cache.addresses()
    assert (cache.capacity, cache.free_pages) == (4 * page_size, 4)


def test_a_cache_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        cache = cache_of()
    cache.k[0][1].add_(1)
    with torch.inference_mode():
        cache.v[0][1].add_(1)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"pages": 1}, ValueError, r"pages=1 must be 2 \.\.\. 2147483647: page 0 is reserved for padded tokens"),
        ({"pages": 0}, ValueError, r"pages=0 must be 2"),
        ({"pages": 2.5}, TypeError, r"pages is 2\.5, which is not an integer"),
        ({"page_size": 0}, ValueError, r"page_size=0 must be 1 or more"),
        ({"page_size": True}, TypeError, r"page_size is True, which is not an integer"),
        ({"dtype": torch.float64}, ValueError, r"float64 .* valid are torch\.float32, torch\.float16, torch\.bfloat16"),
        ({"sites": []}, ValueError, r"sites is empty"),
        ({"sites": [(2, 8)]}, ValueError, r"sites\[0\]=\(2, 8\) must be \(kv_heads, head_size, value_head_size\)"),
        ({"sites": [SHAPE, (0, 8, 8)]}, ValueError, r"sites\[1\]=\(0, 8, 8\) holds a size below 1"),
    ],
)
def test_b15_a_cache_without_a_page_for_padding_or_with_odd_sizes_is_refused(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        cache_of(**changes)


def test_a_body_with_other_sites_is_refused_by_name() -> None:
    site = replace(SITE, kv_heads=2, head_size=8, value_head_size=8)
    cache = cache_of(sites=[SHAPE, SHAPE])
    cache.check_sites([site, site])
    cache.check_sites([SHAPE, SHAPE])
    with pytest.raises(ValueError, match="the cache has 2 sites, the body has 1"):
        cache.check_sites([site])
    with pytest.raises(
        ValueError, match=r"site 1 \(layers\.0\.self_attn\) keeps 2 KV heads of 8/16, the cache has 2 KV"
    ):
        cache.check_sites([site, replace(site, value_head_size=16)])
    with pytest.raises(ValueError, match=r"site 0 .* computes in torch\.float16, the cache holds torch\.float32"):
        cache.check_sites([replace(site, dtype=torch.float16), site])


# -- for a model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2"])
def test_a_models_config_says_what_its_sites_keep(name: str) -> None:
    model = tiny_causal_lm(name).to(torch.bfloat16)
    for part in (model, model.model):
        cache = PagedKVCache.for_model(part, pages=3)
        assert cache.sites == ((2, 8, 8),) * 2
        assert (cache.page_size, cache.dtype, cache.device.type) == (16, torch.bfloat16, "cpu")
    assert PagedKVCache.for_model(model, pages=3, dtype=torch.float32, device="meta").dtype == torch.float32


def test_latent_attention_keeps_all_heads() -> None:
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=9, hidden_size=32, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    )  # fmt: skip
    model = transformers.DeepseekV3Model(config)
    assert PagedKVCache.for_model(model, pages=3).sites == ((4, 12, 6),) * 2


def test_what_was_traced_goes_before_what_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullgraph_compile import api
    from fullgraph_compile.report import Report

    sites = (replace(SITE, kv_heads=1, dtype=torch.bfloat16), replace(SITE, kv_heads=2, dtype=torch.bfloat16))
    monkeypatch.setattr(api, "report", lambda body: Report(sites=sites))
    cache = PagedKVCache.for_model(tiny("Llama"), pages=3)
    assert cache.sites == ((1, 16, 16), (2, 16, 16)) and cache.dtype == torch.bfloat16


def test_a_model_that_does_not_say_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear does not say .* \(it has no config that does\)"):
        PagedKVCache.for_model(torch.nn.Linear(2, 2), pages=3)
    model = tiny("Llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"its config has linear_attention\): compile and warm it up first"):
        PagedKVCache.for_model(model, pages=3)
