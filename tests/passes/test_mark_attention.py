"""Every attention call that is fully understood becomes a site, and the marked graph computes what eager computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullgraph_compile import ops
from fullgraph_compile.passes.common import op_name
from fullgraph_compile.passes.mark_attention import Marked, mark_attention
from tests.passes.direct_attention import attention_by, dense_attention, run
from tests.tracing import TOKENS, trace


@pytest.fixture(autouse=True)
def direct_attention() -> Iterator[None]:
    with attention_by(dense_attention):
        yield


def marked_sdpa(fn: Callable[..., Tensor], *inputs: Tensor, **keywords: Any) -> Marked:
    gm, token = trace(fn, *inputs, **{"backed": True, **keywords})
    return mark_attention(gm, token)


def refusals(fn: Callable[..., Tensor], *inputs: Tensor, **keywords: Any) -> str:
    marked = marked_sdpa(fn, *inputs, **keywords)
    assert not marked.sites
    assert [op_name(n) for n in marked.gm.graph.nodes].count("scaled_dot_product_attention") == len(marked.refusals)
    return "; ".join(map(str, marked.refusals))


sdpa = F.scaled_dot_product_attention
X = torch.randn(1, 4, TOKENS, 8)


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()


def half(x: Tensor) -> Tensor:
    return x[:, 1:3] * 0.5


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], str, int]] = {
    "is_causal": (lambda x: sdpa(x, x, x, is_causal=True), "causal", 4),
    "two-sided": (lambda x: sdpa(x, x, x), "two-sided", 4),
    "scale": (lambda x: sdpa(x, x, x, is_causal=True, scale=0.7), "causal", 4),
    "positional arguments": (lambda x: sdpa(x, x, x, None, 0.0, True), "causal", 4),
    "grouped": (lambda x: sdpa(x, half(x), half(x) * 2, is_causal=True, enable_gqa=True), "causal", 2),
    "mask": (lambda x: sdpa(x, x, x, causal(x)), "causal", 4),
    "additive mask": (lambda x: sdpa(
        x, x, x, torch.zeros(x.shape[2], x.shape[2]).masked_fill(~causal(x), float("-inf"))), "causal", 4),
    "repeat_interleave": (lambda x: sdpa(
        x, half(x).repeat_interleave(2, dim=1), (half(x) + 1).repeat_interleave(2, 1), is_causal=True), "causal", 2),
    "expanded by unsqueeze": (lambda x: sdpa(
        x, *(y.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(1, 4, -1, 8) for y in (half(x), half(x) * 2)),
        is_causal=True), "causal", 2),
    "repeated in another order": (lambda x: sdpa(
        x, half(x).repeat(1, 2, 1, 1), half(x).repeat(1, 2, 1, 1), is_causal=True), "causal", 4),
    "only keys repeated": (lambda x: sdpa(
        x, half(x).repeat_interleave(2, dim=1), x, is_causal=True), "causal", 4),
    "one key head": (lambda x: sdpa(
        x, x[:, :1] * 2, x[:, 1:2], is_causal=True, enable_gqa=True), "causal", 1),
    "flat": (lambda x: sdpa(x[0], x[0] + 1, x[0], is_causal=True), "causal", 4),
    "narrow values": (lambda x: sdpa(x, x, x[..., :6], is_causal=True), "causal", 4),
    "seen through a view": (lambda x: sdpa(x, x, x, causal(x)).view(4, -1, 8), "causal", 4),
    "turned to rows": (lambda x: sdpa(x, x, x).transpose(1, 2).reshape(1, -1, 32),
                       "two-sided", 4),
    "rows in the last dim": (lambda x: sdpa(
        *(x.transpose(2, 3).contiguous().transpose(2, 3),) * 3, is_causal=True), "causal", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_replaced_and_equal_eager(name: str) -> None:
    fn, mask, kv_heads = CALLS[name]
    marked = marked_sdpa(fn, X)
    assert not marked.refusals
    (site,) = marked.sites
    assert (site.mask, site.heads, site.kv_heads, marked.requests) == (mask, 4, kv_heads, "one")
    assert site.scale == (0.7 if name == "scale" else 1 / math.sqrt(8))
    call = next(n for n in marked.gm.graph.nodes if n.target is ops.attention)
    assert call.args[-1] == 0
    assert "test_mark_attention" in call.meta["stack_trace"]
    assert all(n.meta["example_value"] is not None for n in marked.gm.graph.nodes if n.op.startswith("call"))
    left = {op_name(n) for n in marked.gm.graph.nodes}
    assert not left & {"tril", "repeat_interleave", "expand"} or name == "only keys repeated"
    longer = torch.randn(1, 4, TOKENS + 5, 8)
    torch.testing.assert_close(run(marked, {"x": longer})[0], fn(longer))


def test_the_incoming_graph_is_unchanged_and_marking_twice_gives_the_same_b107() -> None:
    def fn(x: Tensor) -> Tensor:
        return sdpa(x, half(x), half(x), causal(x), enable_gqa=True)

    gm, token = trace(fn, X, backed=True)
    before = str(gm.graph), [dict(n.meta) for n in gm.graph.nodes]
    first, second = mark_attention(gm, token), mark_attention(gm, token)
    again = mark_attention(first.gm, token)
    assert (str(gm.graph), [dict(n.meta) for n in gm.graph.nodes]) == before
    assert str(first.gm.graph) == str(second.gm.graph) == str(again.gm.graph)
    assert first.sites == second.sites
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in first.gm.graph.nodes if n.op == "placeholder"] == names


def test_a_mask_that_feeds_something_else_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        mask = causal(x)
        return sdpa(x, x, x, mask) + mask.sum()

    marked = marked_sdpa(fn, X)
    assert len(marked.sites) == 1
    assert {"tril", "sum"} <= {op_name(n) for n in marked.gm.graph.nodes}


def test_a_mask_that_is_written_to_is_removed_with_its_writes() -> None:
    def fn(x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[2], x.shape[2], dtype=torch.bool)
        mask[:, :] = causal(x)
        return sdpa(x, x, x, mask)

    marked = marked_sdpa(fn, X)
    assert len(marked.sites) == 1
    assert "setitem" not in {op_name(n) for n in marked.gm.graph.nodes}


def test_a_mask_that_changes_between_layers_is_refused_the_second_time() -> None:
    def fn(x: Tensor) -> Tensor:
        mask = causal(x)
        x = sdpa(x, x, x, mask)
        mask[:, :2] = True
        return sdpa(x, x, x, mask)

    marked = marked_sdpa(fn, X)
    assert len(marked.sites) == 1
    assert "changed in place" in str(marked.refusals[0])
    assert "setitem" in {op_name(n) for n in marked.gm.graph.nodes}
    longer = torch.randn(1, 4, TOKENS + 5, 8)
    torch.testing.assert_close(run(marked, {"x": longer})[0], fn(longer))


def test_what_is_not_understood_is_refused_by_source_line_and_left() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))

    def alibi(x: Tensor) -> Tensor:
        i = torch.arange(x.shape[2])
        return torch.where(causal(x), (i[None] - i[:, None]) * 0.5, float("-inf"))

    def blocks(x: Tensor) -> Tensor:
        i = torch.arange(x.shape[2]) // 4
        return i[:, None] == i

    assert "dropout_p is 0.1" in refusals(lambda x: sdpa(x, x, x, dropout_p=0.1), X)
    assert "adds a bias" in refusals(lambda x: sdpa(x, x, x, alibi(x)), X)
    assert "none of causal" in refusals(lambda x: sdpa(x, x, x, blocks(x)), X)
    assert "none of causal" in refusals(lambda x: sdpa(x, x, x, causal(x) | (torch.arange(x.shape[2]) < 3)), X)
    assert "weight" in refusals(lambda x, w: sdpa(x, x, x, w[: x.shape[2], : x.shape[2]]), X, weight)
    assert "not one for each" in refusals(lambda x, k: sdpa(x, k, k), X, torch.randn(1, 4, 9, 8))
    assert "batch dim of queries, keys and values is 3, 3, 3" in refusals(
        lambda x: sdpa(x, x, x), X.expand(3, -1, -1, -1)
    )
    assert "batch dim" in refusals(lambda x: sdpa(x, x, x), torch.randn(TOKENS, 2, 4, 8))
    assert "mask has dims of its own" in refusals(lambda x: sdpa(x, x, x, causal(x).expand(3, 1, -1, -1)), X)
    source = refusals(lambda x: sdpa(x, x, x, dropout_p=0.1), X)
    assert "test_mark_attention.py" in source
    assert "dropout_p=0.1" in source


def test_sites_that_tell_requests_apart_differently_are_refused() -> None:
    def fn(q: Tensor, positions: Tensor) -> Tensor:
        request = (torch.diff(positions[0], prepend=positions[0, :1] - 1) != 1).cumsum(0)
        x = sdpa(q, q, q, causal(q) & (request[:, None] == request))
        return sdpa(x, x, x, is_causal=True)

    marked = marked_sdpa(fn, X, torch.arange(TOKENS)[None])
    assert (len(marked.sites), marked.requests, marked.positions) == (1, "positions", "l_positions_")
    assert "told apart by nothing (all tokens are one), but by restarts of l_positions_" in str(marked.refusals[0])


# -- calls that are the op already ------------------------------------------------------------------------------------


def test_the_op_itself_is_numbered_and_read() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = nn.Parameter(torch.randn(4))

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            x = ops.attention(q, k, k[..., :6], self.sinks, None, 0.5, 3, 0, 30.0, -1)
            return x.sum(-1, keepdim=True) + ops.attention(q, q, q, None, None, 0.25, -1, -1, 0.0, -1)

    gm, token = trace(Body(), torch.randn(TOKENS, 4, 8), torch.randn(TOKENS, 2, 8))
    marked = mark_attention(gm, token)
    assert (marked.requests, marked.positions, marked.refusals) == ("batch", None, ())
    first, second = marked.sites
    assert (first.heads, first.kv_heads, first.head_size, first.value_head_size) == (4, 2, 8, 6)
    assert (first.scale, first.left, first.right, first.softcap, first.sinks) == (0.5, 3, 0, 30.0, True)
    assert (second.scale, second.mask, second.softcap, second.sinks) == (0.25, "two-sided", 0.0, False)
    assert [n.args[-1] for n in marked.gm.graph.nodes if n.target is ops.attention] == [0, 1]
    assert [n.args[-1] for n in gm.graph.nodes if n.target is ops.attention] == [-1, -1]


def test_the_op_takes_one_dtype() -> None:
    def body(q: Tensor, k: Tensor) -> Tensor:
        return ops.attention(q, k, k, None, None, 0.5, -1, 0, 0.0, -1)

    gm, token = trace(body, torch.randn(TOKENS, 4, 8), torch.randn(TOKENS, 2, 8).bfloat16())
    (refusal,) = mark_attention(gm, token).refusals
    assert "are torch.bfloat16 and torch.float32; the op takes one dtype" in str(refusal)
