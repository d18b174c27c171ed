"""Attention in plain torch: every feature, any device, nothing that a graph could not replay.

All masks that the op knows let a query see one range of key rows, so the range is worked out for each query row from
the metadata, on the device, and everything else follows from it.  The shapes depend on no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend, Sentinel
from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.ops import AttentionSite

# Score of a key that a query does not see.  A row that sees none becomes NaN, and is zeroed at the end.
_UNSEEN = float("-inf")

# Scores that are held at a time, so that they stay in a CPU's cache.
_SCORES = 2**21


class ReferenceAttention(AttentionBackend):
    """Plain torch with fp32 accumulation (fp64 for fp64 inputs).  What other backends are measured against."""

    name: ClassVar[str] = "reference"
    sentinel: ClassVar[Sentinel] = Sentinel()
    paged: ClassVar[bool] = True

    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        if not site.dtype.is_floating_point:
            return [f"dtype {site.dtype} is not a floating point type"]
        return []

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        site: AttentionSite,
        static: StaticBatch,
    ) -> Tensor:
        keys = keys_given(k, v, static) if static.cache is None else keys_in_pages(site, static)
        return attend(
            q, keys, sinks, slopes,
            scale=site.scale, left=site.left, right=site.right, softcap=site.softcap, static=static,
        )  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """K and V in rows, each request's rows one after another.

    Attributes:
        k: ``[key rows, kv_heads, head_size]``.
        v: ``[key rows, kv_heads, value_head_size]``.
        starts: ``[R]`` int64, the first row of each request.
        unused: ``[key rows]`` bool, rows that are no key of a request; they hold anything.
    """

    k: Tensor
    v: Tensor
    starts: Tensor
    unused: Tensor


def keys_given(k: Tensor, v: Tensor, static: StaticBatch) -> Keys:
    """Keys that came as arguments, laid out by ``cu_k``."""
    return Keys(k, v, static.cu_k[:-1].long(), torch.arange(k.shape[0], device=k.device) >= static.cu_k[-1])


def keys_in_pages(site: AttentionSite, static: StaticBatch) -> Keys:
    """Keys of a site in the cache of the batch: as many rows for each request as its pages could hold."""
    assert static.cache is not None and static.page_table is not None
    table = static.page_table
    if static.table_rows is not None:
        table = table[static.table_rows.long().clamp(0, table.shape[0] - 1)]
    slots, columns = table.shape
    # A legal table changes nothing here; an illegal one gives wrong values, and no read out of bounds.
    pages = table.long().clamp(0, static.cache.pages - 1).flatten()
    k, v = (pool[site.index][pages].flatten(0, 1) for pool in (static.cache.k, static.cache.v))
    rows = columns * static.cache.page_size
    starts = torch.arange(slots, device=k.device) * rows
    unused = torch.arange(rows, device=k.device) >= static.k_lens[:, None]
    return Keys(k, v, starts, unused.flatten())


@dataclass(frozen=True)
class _Seen:
    """The key rows that each query row sees: ``first <= row < end``, none where ``end <= first``.

    All are ``[tokens]`` int64.  ``own`` is the key row at the query's own position.
    """

    first: Tensor
    end: Tensor
    own: Tensor

    def mask(self, rows: slice, key_rows: Tensor) -> Tensor:
        """``[query rows, key rows]`` bool."""
        return (key_rows >= self.first[rows, None]) & (key_rows < self.end[rows, None])


def attend(
    q: Tensor,
    keys: Keys,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    static: StaticBatch,
) -> Tensor:
    """Attention over a packed batch.

    A request with fewer queries than keys has its queries at the end of its keys.  A soft cap is applied before ALiBi
    slopes are added.  A row depends on its own request only: not even a NaN of another request reaches it.

    Args:
        q: ``[tokens, heads, head_size]``, any float dtype and device.
        keys: its ``kv_heads`` divide ``heads``.
        sinks: ``[heads]`` or None.
        slopes: ``[heads]`` or None.
        scale, left, right, softcap: as ``full_prefill::attention`` takes them.
        static: reads ``cu_q``, ``q_lens`` and ``k_lens``.

    Returns:
        ``[tokens, heads, value_head_size]`` in the dtype of ``q``, contiguous; zeros where a row sees no key.
    """
    k, v = keys.k, keys.v
    tokens, heads, _ = q.shape
    key_rows, kv_heads, value_size = v.shape
    if not tokens or not key_rows:
        return q.new_zeros(tokens, heads, value_size)
    seen = _seen(static, keys, tokens, left, right)
    wide = torch.promote_types(q.dtype, torch.float32)

    # A masked NaN is still a NaN once it is multiplied by its weight of 0, so no such row enters the products, and no
    # unused row; the queries that do see a broken row get its NaN back below.
    broken = ~(k.isfinite().all(-1) & v.isfinite().all(-1)) | keys.unused[:, None]
    k = k.to(wide).masked_fill(broken[..., None], 0.0)
    v = v.to(wide).masked_fill(broken[..., None], 0.0)

    # [kv_heads, group, tokens, head_size]: the query heads of one group share their keys, which are never repeated.
    grouped = q.to(wide).view(tokens, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3)
    if q.device.type == "cpu" and sinks is None and slopes is None and not softcap and k.shape[2] == value_size:
        out = _fused(grouped, k, v, scale, seen)
    else:
        out = _explicit(grouped, k, v, sinks, slopes, scale, softcap, seen)

    counts = F.pad(broken.cumsum(0), (0, 0, 1, 0))
    sees_broken = counts[seen.end] > counts[seen.first]  # [tokens, kv_heads]
    out = out.masked_fill(sees_broken.t()[:, None, :, None], float("nan"))
    out = out.masked_fill((seen.end <= seen.first)[:, None], 0.0)
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype).contiguous()


def _seen(static: StaticBatch, keys: Keys, tokens: int, left: int, right: int) -> _Seen:
    cu_q, key_rows = static.cu_q.long(), keys.k.shape[0]
    q_lens, k_lens = static.q_lens.long(), static.k_lens.long()
    rows = torch.arange(tokens, device=cu_q.device)
    # How many requests end at or before a row.  Unused slots end at the real total: padded rows get the slot count.
    request = torch.bucketize(rows, cu_q[1:], right=True)
    padded = request >= q_lens.shape[0]
    request = request.clamp(max=q_lens.shape[0] - 1)

    start, length = keys.starts[request], k_lens[request]
    position = rows - cu_q[request] + length - q_lens[request]
    first = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
    end = length if right < 0 else torch.minimum(position + right + 1, length)
    # The bounds hold for every legal batch; an illegal one gives wrong values here, and no read out of bounds.
    first = (start + first).clamp(0, key_rows)
    end = (start + end).masked_fill(padded, 0).clamp(0, key_rows)
    return _Seen(first, end, start + position)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: _Seen) -> Tensor:
    """The part that torch's own CPU kernel covers, three times as fast and without a tensor of scores.

    ``q`` is ``[kv_heads, group, tokens, head_size]``; so is the result.
    """
    group = q.shape[1]
    key_rows = torch.arange(k.shape[0], device=q.device)
    bias = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~seen.mask(slice(None), key_rows), _UNSEEN)
    shared_k, shared_v = (t.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for t in (k, v))
    return F.scaled_dot_product_attention(q, shared_k, shared_v, attn_mask=bias, scale=scale)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    softcap: float,
    seen: _Seen,
) -> Tensor:
    """Scores, softmax and weighted values, some query rows at a time.

    ``q`` is ``[kv_heads, group, tokens, head_size]``; the result is ``[kv_heads, group, tokens, value_head_size]``.
    """
    kv_heads, group, tokens, _ = q.shape
    key_rows = torch.arange(k.shape[0], device=q.device)
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    step = max(1, _SCORES // (kv_heads * group * k.shape[0]))
    blocks = []
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        scores = torch.bmm((q[:, :, rows] * scale).flatten(1, 2), keys).unflatten(1, (group, -1))
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        if slopes is not None:
            distance = (key_rows - seen.own[rows, None]).to(q.dtype)
            scores.add_(slopes.to(q.dtype).view(kv_heads, group, 1, 1) * distance)
        scores.masked_fill_(~seen.mask(rows, key_rows), _UNSEEN)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            # A sink so far above the scores that this is infinite leaves them no weight: 0, as it should be.
            total = total + (sinks.to(q.dtype).view(kv_heads, group, 1, 1) - top).exp()
        weighted = torch.bmm(weights.flatten(1, 2), values).unflatten(1, (group, -1))
        blocks.append(weighted / total)
    return torch.cat(blocks, dim=2)
