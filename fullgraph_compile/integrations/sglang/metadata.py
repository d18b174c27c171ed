"""Attention backends of SGLang under a full graph: which can be captured at all."""

from __future__ import annotations

from typing import Any

from fullgraph_compile.integrations.sglang.release import ROOT, find

_PREPARE = "init_forward_metadata_out_graph"


def prefill_attention(attention: Any) -> Any:
    """The attention backend of prefill, out of one that has others for other phases."""
    child = getattr(attention, "prefill_backend", None)
    # FlashInfer's has the name of its kernels there.
    return attention if child is None or isinstance(child, str) else child


def describe_attention(attention: Any) -> str:
    return type(prefill_attention(attention)).__name__


def check_attention(attention: Any) -> None:
    """Refuse an attention backend without metadata at fixed addresses: SGLang's base class does nothing there, so its
    graphs would read the metadata of the capture for ever.

    Raises:
        RuntimeError: naming the backend and those that can.
    """
    base = find(ROOT + "layers.attention.base_attn_backend.AttentionBackend")
    method = getattr(type(prefill_attention(attention)), _PREPARE, None)
    if base is not None and method is getattr(base, _PREPARE, None):
        raise RuntimeError(
            f"fullgraph_compile: SGLang's {describe_attention(attention)} has no metadata that a full prefill graph "
            "can read; choose --attention-backend flashinfer, fa3 or fa4, or --cuda-graph-backend-prefill breakable"
        )
