"""The attention op in a marked graph that is run as it is: what computes it, and the inputs that the graph takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile import ops
from fullgraph_compile.passes.common import is_size, placeholders, value_of
from fullgraph_compile.passes.mark_attention import Marked

REQUESTS: list[Tensor] = []
"""The request of each token, for the attention of these tests."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None,
    scale: float, left: int, right: int, softcap: float, site: int,
) -> Tensor:  # fmt: skip
    """The op's definition as one dense softmax in float64."""
    assert sinks is None
    assert slopes is None
    assert site >= 0
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(len(q))[:, None], torch.arange(len(q))
    seen = REQUESTS[0][:, None] == REQUESTS[0]
    if left >= 0:
        seen = seen & (key >= query - left)
    if right >= 0:
        seen = seen & (key <= query + right)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype).contiguous()


@contextmanager
def attention_by(fn: Callable[..., Tensor]) -> Iterator[None]:
    """Outside of any graph the op computes ``fn``."""
    before = ops._direct
    ops.set_direct_attention(fn)
    try:
        yield
    finally:
        ops._direct = before


def run(marked: Marked, given: dict[str, Tensor]) -> Any:
    """Run the marked graph on its example inputs, with those in ``given`` (by the end of their names) replaced."""
    tokens = next(max(x.shape) for x in given.values()) if "x" not in given else given["x"].shape[2]
    restarts = torch.zeros(tokens, dtype=torch.long)
    if marked.requests == "positions":
        restarts[1:] = (given["position_ids"].flatten().diff() != 1).cumsum(0)
    REQUESTS[:] = [restarts]
    examples = dict(zip(placeholders(marked.gm), marked.gm.meta["example_inputs"], strict=True))
    inputs = [
        tokens if is_size(value_of(node)) else next((x for n, x in given.items() if node.name.endswith(f"_{n}_")), old)
        for node, old in examples.items()
    ]
    with torch.no_grad():
        return marked.gm(*inputs)
