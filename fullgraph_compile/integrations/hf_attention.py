"""transformers' attention interface on the op, and what attention a model calls when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullgraph_compile import ops
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.plain import NotServed

# A name that transformers' mask registry does not know: no mask is built for it, as the op makes its own.
ATTENTION = "full_prefill"

# Arguments of an attention function that change nothing of what the op computes.
_NO_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
     "output_router_logits", "logits_to_keep", "labels", "num_items_in_batch", "is_causal", "head_mask",
     "cache", "past_key_values", "layer_idx", "deterministic", "position_embeddings"}
)  # fmt: skip


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface on the op.

    Args:
        query: ``[1, heads, T, head_size]``.
        key: ``[1, kv_heads, T, head_size]``.
        value: ``[1, kv_heads, T, value_head_size]``.

    Returns:
        ``[1, T, heads, value_head_size]``, and no attention weights.

    Raises:
        NotServed: the call means something that the op does not say.
    """
    name = type(module).__name__
    if attention_mask is not None:
        raise NotServed(Reason.ATTENTION, f"{name} gives its attention a mask of its own")
    if query.shape[0] != 1:
        raise NotServed(Reason.BATCHED, f"{name} attends with a batch dim of {query.shape[0]}")
    if key.shape[2] != query.shape[2]:
        # Compressed keys, memories, a prefix of its own: rows that are no tokens of the call.
        raise NotServed(
            Reason.ATTENTION,
            f"{name} attends from {query.shape[2]} tokens to {key.shape[2]} keys: some are no tokens of the call",
        )
    if dropout:
        raise NotServed(Reason.TRAINING, f"{name} attends with dropout {dropout}")
    unknown = sorted(k for k, v in others.items() if v is not None and v is not False and k not in _NO_EFFECT)
    if unknown:
        raise NotServed(Reason.ATTENTION, f"{name} gives its attention {', '.join(unknown)}, which is not understood")
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        # As torch's own attention does: a rotation in float32 leaves queries and keys in that.
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    left, right = sides(module, sliding_window, others.get("is_causal"))
    out = ops.attention(q, k, v, s_aux, None, scale, left, right, float(softcap or 0.0), -1)
    return out.unsqueeze(0), None


def sides(module: nn.Module, sliding_window: int | None, is_causal: bool | None) -> tuple[int, int]:
    """How many keys a call says that a query sees on each side of itself; -1 = all."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = -1 if sliding_window is None else int(sliding_window) - 1
    return left, 0 if causal else left


@contextmanager
def counting_sites(sites: list[str]) -> Iterator[None]:
    """Append to ``sites`` at each call of the op that is made eagerly."""
    before = ops.direct_attention()

    def counted(*args: Any) -> Tensor:
        sites.append("")
        return before(*args)

    ops.set_direct_attention(counted)
    try:
        yield
    finally:
        ops.set_direct_attention(before)


class Watching(TorchDispatchMode):
    """Notes in ``attends`` whether something attends among ``tokens`` tokens: torch's own attention, or a softmax over
    their pairs."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.attends = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        softmax = "softmax" in name and isinstance(out, Tensor) and tuple(out.shape[-2:]) == (self.tokens, self.tokens)
        self.attends = self.attends or softmax or "scaled_dot_product" in name
        return out
