"""Attention once more, written as plainly as can be: one request, one head, one explicit mask at a time, in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attend_requests(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
) -> Tensor:
    """Packed attention, ``[rows of q, heads, value_head_size]`` fp64; rows past ``sum(q_lens)`` are zeros."""
    heads, kv_heads = q.shape[1], k.shape[1]
    out = torch.zeros(q.shape[0], heads, v.shape[2], dtype=torch.float64, device=q.device)
    q_start = k_start = 0
    for n, m in zip(q_lens, k_lens, strict=True):
        for head in range(heads):
            kv_head = head * kv_heads // heads
            queries = q[q_start : q_start + n, head].double()
            keys = k[k_start : k_start + m, kv_head].double()
            values = v[k_start : k_start + m, kv_head].double()
            sink = None if sinks is None else float(sinks[head])
            slope = 0.0 if slopes is None else float(slopes[head])
            for i in range(n):
                position = m - n + i
                visible = [
                    j for j in range(m) if (left < 0 or j >= position - left) and (right < 0 or j <= position + right)
                ]
                if not visible:
                    continue
                scores = keys[visible] @ queries[i] * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores + slope * (torch.tensor(visible, device=q.device, dtype=torch.float64) - position)
                top = max(float(scores.max()), -math.inf if sink is None else sink)
                weights = torch.exp(scores - top)
                total = weights.sum() + (0.0 if sink is None else math.exp(sink - top))
                out[q_start + i, head] = weights @ values[visible] / total
        q_start, k_start = q_start + n, k_start + m
    return out
