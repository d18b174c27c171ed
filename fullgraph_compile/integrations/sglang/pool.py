"""SGLang's KV pool as our own attention reads and writes it, and what keeps it from doing so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.integrations.sglang.metadata import prefill_attention
from fullgraph_compile.integrations.sglang.release import POOL, find

# Attention backends of SGLang that do nothing but attend to the plain pool.
_KNOWN = ("FlashInferAttnBackend", "FlashAttentionBackend", "TorchNativeAttnBackend")
# Answers of a runner, its model's configuration and its arguments that mean another kind of attention.
_RUNNER = {
    "require_mlp_tp_gather": "ranks share a batch",
    "require_attn_tp_gather": "ranks share a batch",
    "_capture_chunked_prefix": "prefixes are attended in chunks of their own (MLA)",
}
_CONFIG = {
    "is_encoder_decoder": "the model has cross attention",
    "is_local_attention_model": "attention is local, in chunks",
}
_ARGUMENTS = {
    "enable_deterministic_inference": "deterministic inference is SGLang's own",
    "enable_mis": "multi-item scoring has a mask of its own",
    "enable_prefill_cp": "prefill is split over ranks by context",
}
_RANKS = ("dcp_size", "attn_cp_size")


@dataclass(frozen=True)
class SitePools:
    """Keys and values of each attention module, a page for each token: SGLang's slots are page ids.

    Attributes:
        k: for each site ``[slots, 1, kv_heads, head_size]``, SGLang's own memory; slot 0 belongs to no request.
        v: likewise, with the head size of values.
        pages: slots of the pool.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    pages: int
    page_size: int = 1


def pools_of(modules: Sequence[Any], pool: Any) -> SitePools:
    """The memory of ``modules`` in SGLang's pool."""
    k, v = zip(*(pool.get_kv_buffer(m.layer_id) for m in modules), strict=True)
    return SitePools(tuple(t.unsqueeze(1) for t in k), tuple(t.unsqueeze(1) for t in v), int(k[0].shape[0]))


def why_not_runner(runner: Any) -> str | None:
    """What of a prefill runner our own attention has no answer to; None = nothing."""
    model_runner = runner.model_runner
    attention, pool = prefill_attention(model_runner.attn_backend), model_runner.token_to_kv_pool
    if type(attention).__name__ not in _KNOWN:
        return f"attention is {type(attention).__name__}"
    if type(pool) is not find(POOL):
        return f"the KV pool is {type(pool).__name__}"
    if getattr(pool, "use_hnd", False) or getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        return f"the KV pool's layout is {getattr(pool, 'kv_cache_layout', 'hnd')}"
    if pool.dtype != pool.store_dtype or getattr(pool, "is_quantized_kv_cache", False):
        return f"the KV cache holds {pool.dtype}"
    if model_runner.sliding_window_size is not None:
        return "the model has sliding windows"
    if getattr(attention, "is_dllm_model", False):
        return "the model decodes by diffusion"
    holders = ((runner, _RUNNER), (model_runner.model_config, _CONFIG), (model_runner.server_args, _ARGUMENTS))
    for holder, questions in holders:
        for name, words in questions.items():
            if getattr(holder, name, False):
                return words
    split = [n for n in _RANKS if (getattr(model_runner.server_args, n, 1) or 1) > 1]
    if split:
        return f"attention is split over ranks ({', '.join(split)})"
    table = model_runner.req_to_token_pool.req_to_token
    if table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        return f"the table of requests' slots is {list(table.shape)} of {table.dtype}"
    return None


def why_not_module(module: Any, dtype: torch.dtype, pool: Any) -> str | None:
    """What of an attention module our own attention has no answer to; None = nothing.

    Args:
        dtype: of its queries.
    """
    layer = f"layer {module.layer_id}"
    if module.is_cross_attention or getattr(module.attn_type, "value", "decoder") != "decoder":
        return f"{layer} is not a decoder's self-attention"
    if (module.sliding_window_size or -1) > 0 or getattr(module, "use_irope", False):
        return f"{layer} has a window"
    if module.logit_cap and module.logit_capping_method != "tanh":
        return f"{layer} caps its logits by {module.logit_capping_method}"
    if module.pos_encoding_mode != "NONE" or getattr(module, "xai_temperature_len", -1) > 0:
        return f"{layer} scales its logits by position"
    if getattr(module, "k_scale", None) is not None or getattr(module, "v_scale", None) is not None:
        return f"{layer} scales its keys and values"
    if dtype != pool.dtype:
        return f"{layer} computes in {dtype}, the KV cache holds {pool.dtype}"
    wanted = tuple((module.tp_k_head_num, size) for size in (module.qk_head_dim, module.v_head_dim))
    held = tuple(tuple(t.shape[1:]) for t in pool.get_kv_buffer(module.layer_id))
    if held != wanted:
        return f"{layer} keeps {wanted} a token, the KV pool {held}"
    return None
