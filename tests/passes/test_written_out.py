"""Attention that a model writes out itself becomes a site, and computes what it did; what is not understood stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullgraph_compile import ops
from fullgraph_compile.passes.common import is_size, op_name, placeholders, value_of
from fullgraph_compile.passes.mark_attention import Marked, mark_attention
from tests.passes.direct_attention import attention_by
from tests.tracing import TOKENS, trace

HEADS = 4
X = torch.randn(1, HEADS, TOKENS, 8, generator=torch.Generator().manual_seed(0))
LEAST = torch.finfo(torch.float32).min


def dense(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None,
    scale: float, left: int, right: int, softcap: float, site: int,
) -> Tensor:  # fmt: skip
    """The op's definition for one request."""
    assert sinks is None
    keys, values = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    distance = torch.arange(len(q)) - torch.arange(len(q))[:, None]
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * distance
    hidden = ((distance < -left) & (left >= 0)) | ((distance > right) & (right >= 0))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(v.dtype).contiguous()


@pytest.fixture(autouse=True)
def direct_attention() -> Iterator[None]:
    with attention_by(dense):
        yield


def marked(fn: Callable[[Tensor], Tensor]) -> Marked:
    gm, token = trace(fn, X, backed=True)
    return mark_attention(gm, token)


def run(found: Marked, x: Tensor) -> Tensor:
    inputs = [x.shape[2] if is_size(value_of(n)) else x for n in placeholders(found.gm)]
    with torch.no_grad():
        return found.gm(*inputs)[0]


def scores(x: Tensor) -> Tensor:
    return torch.matmul(x, (x + 1).transpose(-1, -2))


def bias(x: Tensor, window: int = 0) -> Tensor:
    """Added to scores, it leaves causal attention."""
    seen = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
    return torch.where(seen.triu(1 - window) if window else seen, 0.0, LEAST)


def slopes() -> Tensor:
    return torch.pow(torch.full((), 0.5), torch.arange(1, 1 + HEADS))


def causal(x: Tensor) -> Tensor:
    weights = F.softmax(scores(x) / math.sqrt(8) + bias(x), dim=-1)
    return torch.matmul(F.dropout(weights, 0.1, False), x)


def bloom(x: Tensor) -> Tensor:
    tokens = x.shape[2]
    alibi = (slopes()[:, None] * (torch.ones(1, tokens).cumsum(-1) - 1)[:, None, :]).reshape(HEADS, 1, tokens)
    out = alibi.baddbmm(batch1=x[0], batch2=x[0].transpose(1, 2), beta=1.0, alpha=0.25).view(1, HEADS, tokens, -1)
    weights = F.softmax(out + bias(x), dim=-1, dtype=torch.float32).to(x.dtype)
    return torch.bmm(weights.view(HEADS, tokens, -1), x[0])


def mpt(x: Tensor) -> Tensor:
    """Distances from the end of a table, and a mask whose True hides."""
    tokens, most = x.shape[2], 128
    alibi = torch.arange(1 - most, 1).view(1, 1, most) * slopes()[:, None, None]
    out = scores(x) * 0.3 + alibi[:, :, max(0, most - tokens) :]
    out = out.masked_fill(bias(x).bool(), LEAST)
    return F.softmax(out.float(), dim=-1).to(x.dtype) @ x


def falcon(x: Tensor) -> Tensor:
    """The bias is scaled with the scores, in place."""
    out = scores(x) + (slopes()[:, None] * torch.arange(x.shape[2])).view(1, HEADS, 1, -1)
    out *= 0.25
    return F.softmax(out + bias(x), dim=-1) @ x


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], str, float, list[float] | None]] = {
    "nothing masked": (lambda x: scores(x).softmax(-1) @ x, "two-sided", 1.0, None),
    "causal": (causal, "causal", 1 / math.sqrt(8), None),
    "window": (lambda x: (scores(x) + bias(x, 3)).softmax(-1) @ x, "causal window of 3", 1.0, None),
    "masked, then scaled": (lambda x: ((scores(x) + bias(x)) / 4.0).softmax(-1) @ x, "causal", 0.25, None),
    "two masks": (lambda x: (scores(x) + bias(x, 3) + bias(x, 5)).softmax(-1) @ x, "causal window of 3", 1.0, None),
    "chosen": (lambda x: torch.where(bias(x) == 0, 2 * scores(x), LEAST).softmax(-1) @ x, "causal", 2.0, None),
    "chosen the other way": (lambda x: torch.where(bias(x) < 0, torch.tensor(-1e9), scores(x)).softmax(-1) @ x,
                             "causal", 1.0, None),
    "kept above the least": (lambda x: torch.max(scores(x) + bias(x), torch.full((), LEAST)).softmax(-1) @ x,
                             "causal", 1.0, None),
    "zeros as a bias": (lambda x: torch.baddbmm(torch.zeros(HEADS, x.shape[2], x.shape[2]), x[0], x[0].mT,
                                                alpha=0.5).softmax(-1) @ x[0], "two-sided", 0.5, None),
    "one key head": (lambda x: ((x @ x[:, :1].transpose(2, 3)) + bias(x)).softmax(-1) @ x[:, 1:2], "causal", 1.0, None),
    "capped": (lambda x: ((scores(x) * 0.5 / 3.0).tanh() * 3.0 + bias(x)).softmax(-1) @ x, "causal", 0.5, None),
    "a cap of one": (lambda x: torch.tanh(scores(x)).softmax(-1) @ x, "two-sided", 1.0, None),
    "bloom": (bloom, "causal", 0.25, [0.5, 0.25, 0.125, 0.0625]),
    "mpt": (mpt, "causal", 0.3, [0.5, 0.25, 0.125, 0.0625]),
    "falcon": (falcon, "causal", 0.25, [0.125, 0.0625, 0.03125, 0.015625]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_it_becomes_a_site_that_computes_the_same(way: str) -> None:
    fn, mask, scale, slopes = WAYS[way]
    found = marked(fn)
    assert not found.refusals
    (site,) = found.sites
    assert (site.mask, site.heads, site.slopes) == (mask, HEADS, slopes is not None)
    assert site.scale == pytest.approx(scale)
    assert not {"softmax", "matmul", "bmm", "baddbmm", "where", "tril"} & {op_name(n) for n in found.gm.graph.nodes}
    call = next(n for n in found.gm.graph.nodes if n.target is ops.attention)
    assert [n.args[1] for n in call.args[4].args[0]] == pytest.approx(slopes) if slopes else call.args[4] is None
    for tokens in (TOKENS, TOKENS + 5, 1):
        x = torch.randn(1, HEADS, tokens, 8, generator=torch.Generator().manual_seed(tokens))
        torch.testing.assert_close(run(found, x), fn(x))


def test_queries_and_keys_that_were_widened_are_read_before_that() -> None:
    half = X.bfloat16()

    def fn(x: Tensor) -> Tensor:
        weights = F.softmax(torch.matmul(x.float(), x.float().transpose(-1, -2)) + bias(x), dim=-1)
        return weights.to(x.dtype) @ x

    gm, token = trace(fn, half, backed=True)
    found = mark_attention(gm, token)
    assert [s.dtype for s in found.sites] == [torch.bfloat16]
    torch.testing.assert_close(run(found, half), fn(half), rtol=0.02, atol=0.02)


def kinked(x: Tensor) -> Tensor:
    i = torch.arange(x.shape[2])
    return -(i[:, None] - i).clamp(max=600).float()


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a bias that ends": (lambda x: (scores(x) + kinked(x)).softmax(-1) @ x, "no slope times a distance"),
    "a bias that differs by query": (
        lambda x: (scores(x) + torch.arange(x.shape[2])[:, None] * torch.arange(x.shape[2]) * 0.1).softmax(-1) @ x,
        "no slope times a distance"),
    "two caps": (lambda x: torch.tanh(torch.tanh(scores(x))).softmax(-1) @ x, "tanh is done"),
    "masked under its cap": (
        lambda x: (torch.tanh((scores(x) + bias(x)) / 3) * 3).softmax(-1) @ x, "before their soft"),
    "a bias under its cap": (
        lambda x: (torch.baddbmm(torch.ones(HEADS, x.shape[2], x.shape[2]), x[0], x[0].mT).tanh() * 3).softmax(-1)
        @ x[0], "before their soft"),
    "a scale by token": (lambda x: (scores(x) * x[..., :1]).softmax(-1) @ x, "mul is done"),
    "a clamp from above": (lambda x: scores(x).clamp(-1e31, 5.0).softmax(-1) @ x, "clamp is done"),
    "hidden but for its scale": (
        lambda x: ((scores(x) + bias(x).clamp(min=-1e4)) * 1e-3).softmax(-1) @ x, "adds a bias"),
    "hidden but a little": (lambda x: scores(x).masked_fill(bias(x) < 0, -100.0).softmax(-1) @ x, "very negative"),
    "over queries": (lambda x: scores(x).softmax(-2) @ x, "over dim -2"),
    "scores read twice": (lambda x: (s := scores(x) * 2).softmax(-1) @ x + s.sum(-1, keepdim=True), "read by"),
    "two products": (lambda x: (scores(x) + scores(x + 1)).softmax(-1) @ x, "depends on queries or keys"),
    "blocks": (lambda x: (scores(x) + bias(x).roll(1, 0)).softmax(-1) @ x, "none of causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_understood_is_refused_and_left(name: str) -> None:
    fn, reason = OTHERS[name]
    found = marked(fn)
    assert not found.sites
    assert reason in str(found.refusals[0])
    assert "test_written_out.py" in str(found.refusals[0])
    torch.testing.assert_close(run(found, X), fn(X))


def test_a_softmax_that_weighs_nothing_is_no_attention() -> None:
    found = marked(lambda x: scores(x).softmax(-1).sum(-1))
    assert (found.sites, found.refusals) == ((), ())
    found = marked(lambda x: scores(x).softmax(-1).square() @ x)
    assert (found.sites, found.refusals) == ((), ())
