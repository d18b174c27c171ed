"""Autocast is told of at each node, so that a graph can be cut anywhere, and put back around what was in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fullgraph_compile.passes.autocast_regions import lift_autocast, lower_autocast, regions_of
from fullgraph_compile.passes.check_row_independence import check_row_independence
from fullgraph_compile.passes.common import copy_graph, op_name
from fullgraph_compile.passes.fuse_projections import fuse_projections
from fullgraph_compile.passes.mark_attention import mark_attention
from fullgraph_compile.passes.split_pieces import split_pieces
from fullgraph_compile.passes.split_tail import split_tail
from tests.tracing import TOKENS, trace

BFLOAT16 = torch.bfloat16


def nested(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", BFLOAT16):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = x @ w
        y = y @ w
    with torch.autocast("cpu", torch.float16):
        z = z @ w
    return (z + y) @ w


def layers(x: Tensor, w: Tensor) -> Tensor:
    """Two layers in a region, with queries and keys that are float32 after a rotation, and the end of rows after it."""
    with torch.autocast("cpu", BFLOAT16):
        for _ in range(2):
            q, k, v = ((x @ w).unflatten(-1, (2, 4)).transpose(1, 2) for _ in range(3))
            angle = torch.ones(4).cos()
            y = torch.nn.functional.scaled_dot_product_attention(q * angle, k * angle, v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(-2) @ w
        return x[:, -1] @ w


def calls(gm: GraphModule) -> list[str]:
    return [name for n in gm.graph.nodes if (name := op_name(n)).endswith("_autocast")]


def test_lifted_and_lowered_a_graph_computes_what_it_did() -> None:
    x, w = torch.randn(TOKENS, 8), torch.randn(8, 8)
    gm, _ = trace(nested, x, w)
    inputs = [
        (x if e.shape[0] == TOKENS else w) if isinstance(e, Tensor) else TOKENS for e in gm.meta["example_inputs"]
    ]
    lifted = lift_autocast(copy_graph(gm))
    assert calls(lifted) == []
    products = [n for n in lifted.graph.nodes if op_name(n) == "matmul"]
    assert [[r[1:3] for r in regions_of(n)] for n in products] == [
        [(BFLOAT16, True)],
        [(BFLOAT16, True), (None, False)],
        [(BFLOAT16, True)],
        [(torch.float16, True)],
        [],
    ]
    lowered = lower_autocast(lifted)
    lowered.graph.lint()
    assert calls(lowered) == calls(gm)
    (got,), (want,) = lowered(*inputs), gm(*inputs)
    assert torch.equal(got, want) and torch.equal(want, nested(x, w))


def test_each_piece_and_the_tail_enter_and_leave_their_own() -> None:
    gm, token = trace(layers, torch.randn(1, TOKENS, 8), torch.randn(8, 8), token_dims=[1, None], backed=True)
    marked = mark_attention(lift_autocast(copy_graph(gm)), token)
    assert [site.dtype for site in marked.sites] == [BFLOAT16, BFLOAT16] and not marked.refusals
    split = split_tail(marked.gm, check_row_independence(marked.gm, token))
    pieces = split_pieces(lower_autocast(split.body))
    assert len(pieces.kinds) == 3
    for part in (*pieces.kinds, lower_autocast(split.tail)):
        inside: list[object] = []
        for node in part.graph.nodes:
            name = op_name(node)
            if name == "_enter_autocast":
                inside.append(node)
            elif name == "_exit_autocast":
                assert inside.pop() is node.args[0]
            elif name == "matmul":
                assert len(inside) == 1
        assert not inside and calls(part)


def test_projections_in_a_region_stay_apart() -> None:
    def two(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", BFLOAT16):
            return torch.nn.functional.linear(x, a) * torch.nn.functional.linear(x, b)

    def fused(fn: object) -> int:
        gm, _ = trace(fn, torch.randn(TOKENS, 8), torch.randn(8, 8), torch.randn(8, 8))  # type: ignore[arg-type]
        return len(fuse_projections(lift_autocast(copy_graph(gm)), lambda stacks: True).stacks)

    assert fused(two) == 0
    assert fused(lambda x, a, b: torch.nn.functional.linear(x, a) * torch.nn.functional.linear(x, b)) == 1


@pytest.mark.parametrize("change", [lift_autocast, lower_autocast])
def test_a_graph_without_regions_is_left_as_it_is(change: Callable[[GraphModule], GraphModule]) -> None:
    gm, _ = trace(lambda x: x.detach() * 2, torch.randn(TOKENS, 4))
    before = [(n.op, n.name) for n in gm.graph.nodes]
    gm = change(gm)
    assert [(n.op, n.name) for n in gm.graph.nodes] == before
