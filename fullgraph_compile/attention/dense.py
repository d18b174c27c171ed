"""Dense attention of one request: what the conformance battery takes for right.  It shares no code with any backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fullgraph_compile.ops import AttentionSite

# What an answer may be off by, absolutely and relative to it: the last rounding, and that of the softmax's weights.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2,
}  # fmt: skip

# An answer without the feature is farther from the right one than this many tolerances.
DISTINCT = 5


@dataclass(frozen=True)
class Operands:
    """What attention takes; of one request, or of all."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    slopes: Tensor | None

    def doubles(self) -> Operands:
        sinks, slopes = (None if t is None else t.double() for t in (self.sinks, self.slopes))
        return Operands(self.q.double(), self.k.double(), self.v.double(), sinks, slopes)


def dense(site: AttentionSite, operands: Operands) -> Tensor:
    """Attention of one request whose queries are its last keys: ``[new tokens, heads, value_head_size]``."""
    o = operands
    group = o.q.shape[1] // o.k.shape[1]
    keys, values = o.k.repeat_interleave(group, 1), o.v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", o.q, keys) * site.scale
    if site.softcap:
        scores = site.softcap * torch.tanh(scores / site.softcap)
    new, total = o.q.shape[0], o.k.shape[0]
    offset = torch.arange(total)[None, :] - (torch.arange(new) + total - new)[:, None]  # of a key from a query
    if o.slopes is not None:
        scores = scores + o.slopes[:, None, None] * offset
    unseen = torch.zeros_like(offset, dtype=torch.bool)
    if site.left >= 0:
        unseen |= offset < -site.left
    if site.right >= 0:
        unseen |= offset > site.right
    scores = scores.masked_fill(unseen, float("-inf"))
    if o.sinks is not None:
        scores = torch.cat([scores, o.sinks[:, None, None].expand(-1, new, 1)], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[:, :, :total], values)
