"""Sites, batches and inputs that every attention backend is tried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.ops import AttentionSite
from tests.attention.oracle import attend_requests

SITE = AttentionSite(
    index=0, node="attention", module="layers.0.self_attn", heads=4, kv_heads=4, head_size=16, value_head_size=16,
    scale=0.25,
)  # fmt: skip
# As FlashInfer takes one: in half precision, of a head size it is built for.
HALF = replace(
    SITE, index=1, dtype=torch.bfloat16, heads=8, kv_heads=2, head_size=64, value_head_size=64, scale=0.125
)  # fmt: skip

# name -> the site with the feature, and the site without it.
FEATURES: dict[str, tuple[AttentionSite, AttentionSite]] = {
    "causal": (SITE, replace(SITE, right=-1)),
    "two-sided": (replace(SITE, right=-1), SITE),
    "causal window": (replace(SITE, left=2), SITE),
    "window of only itself": (replace(SITE, left=0), SITE),
    "two-sided window": (replace(SITE, left=2, right=1), replace(SITE, right=-1)),
    "right window": (replace(SITE, left=-1, right=2), replace(SITE, right=-1)),
    "scale": (replace(SITE, scale=1.1), SITE),
    "soft cap": (replace(SITE, softcap=0.7), SITE),
    "sinks": (replace(SITE, sinks=True), SITE),
    "ALiBi slopes": (replace(SITE, slopes=True), SITE),
    "ALiBi slopes, two-sided": (replace(SITE, slopes=True, right=-1), replace(SITE, right=-1)),
    "GQA": (replace(SITE, kv_heads=2), replace(SITE, kv_heads=1)),
    "MQA": (replace(SITE, kv_heads=1), replace(SITE, kv_heads=2)),
    "smaller value heads": (replace(SITE, head_size=24, value_head_size=16), SITE),
    "larger value heads": (
        replace(SITE, value_head_size=32, kv_heads=2),
        replace(SITE, value_head_size=32, kv_heads=1),
    ),
    "all at once": (
        replace(SITE, kv_heads=2, left=3, scale=0.4, softcap=2.0, sinks=True, slopes=True, value_head_size=8),
        replace(SITE, kv_heads=2, left=3, scale=0.4, softcap=2.0, sinks=True, value_head_size=8),
    ),
}

# (new tokens, keys) of the requests; with prefixes, empty requests, a request without keys, and single tokens.
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "one request": ([11], [11]),
    "packed": ([5, 1, 9, 4], [5, 1, 9, 4]),
    "prefixes": ([3, 6, 1, 4], [13, 6, 9, 5]),
    "empty requests": ([0, 5, 0, 3, 0], [0, 5, 4, 7, 0]),
    "no keys": ([4, 3, 6], [4, 0, 6]),
    "fewer keys than queries": ([6, 4], [3, 9]),
}


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    slopes: Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.sinks, self.slopes


def static_batch(
    q_lens: Sequence[int],
    k_lens: Sequence[int] | None = None,
    *,
    tokens: int | None = None,
    slots: int | None = None,
    max_k: int | None = None,
    device: torch.device | str = "cpu",
) -> StaticBatch:
    """Metadata of a batch in a bucket of ``tokens`` rows and ``slots`` request slots; by default an exact fit."""
    k_lens = list(q_lens if k_lens is None else k_lens)
    tokens = sum(q_lens) if tokens is None else tokens
    unused = [0] * ((len(q_lens) if slots is None else slots) - len(q_lens))
    new, keys = [*q_lens, *unused], [*k_lens, *unused]
    cu_q, cu_k = ([sum(lens[:i]) for i in range(len(lens) + 1)] for lens in (new, keys))
    return StaticBatch(
        tokens,
        len(new),
        max(2, tokens),
        max(1, *keys) if max_k is None else max_k,
        *(
            torch.tensor(x, dtype=torch.int32, device=device)
            for x in (cu_q, cu_k, new, keys, [*cu_q, tokens], [*cu_k, cu_k[-1]], [sum(new)])
        ),
    )


def inputs_for(
    site: AttentionSite, q_rows: int, k_rows: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> Inputs:
    """Random inputs; scores large enough that masks, caps and sinks matter."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, site.dtype)

    return Inputs(
        random(q_rows, site.heads, site.head_size),
        random(k_rows, site.kv_heads, site.head_size),
        random(k_rows, site.kv_heads, site.value_head_size),
        random(site.heads) if site.sinks else None,
        (random(site.heads).abs() + 0.1) if site.slopes else None,
    )


def expected(site: AttentionSite, inputs: Inputs, q_lens: Sequence[int], k_lens: Sequence[int]) -> Tensor:
    """The oracle's answer, fp64, on the device of the inputs; worked out on the CPU, where many small ops are fast."""
    return attend_requests(
        *(None if t is None else t.cpu() for t in inputs.tensors()),
        scale=site.scale, left=site.left, right=site.right, softcap=site.softcap, q_lens=q_lens, k_lens=k_lens,
    ).to(inputs.q.device)  # fmt: skip


def dropped(inputs: Inputs, site: AttentionSite) -> Inputs:
    """The same inputs as a site without the feature takes them: fewer heads or sizes, no sinks, no slopes."""
    return Inputs(
        inputs.q[..., : site.head_size],
        inputs.k[:, : site.kv_heads, : site.head_size]
        if site.kv_heads <= inputs.k.shape[1]
        else _repeat(inputs.k, site),
        inputs.v[:, : site.kv_heads] if site.kv_heads <= inputs.v.shape[1] else _repeat(inputs.v, site),
        inputs.sinks if site.sinks else None,
        inputs.slopes if site.slopes else None,
    )


def _repeat(t: Tensor, site: AttentionSite) -> Tensor:
    # Other heads than the true ones, not repeats of them: those would give the same answer.
    return torch.cat([t, t.flip(0)], dim=1)[:, : site.kv_heads]


def poison_tail(inputs: Inputs, q_rows: int, k_rows: int, value: float) -> None:
    """Fill the rows past the real totals, in place."""
    inputs.q[q_rows:] = value
    inputs.k[k_rows:] = value
    inputs.v[k_rows:] = value
