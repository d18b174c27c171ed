"""Multiply few tokens with long rows of a weight in parts of the row, so that no multiprocessor idles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fullgraph_compile.passes.common import copy_graph, value_of

# Measured on an H200 (docs/performance-log.md): a product of few rows with a weight of at least twice as many columns
# as rows takes 9 to 12% less in two parts, their sum part of the kernel that reads it.
PARTS = 2
COLUMNS_TO_ROWS = 2
LEAST_BYTES = 32 << 20
MOST_TOKENS = 128


def split_products(piece: GraphModule) -> GraphModule | None:
    """The piece with its long products as two batched ones and a sum in fp32; None where it has no such product.

    The result is rounded once, as that of the whole product is, so it is no less exact.
    """
    if not any(map(_is_long, piece.graph.nodes)):
        return None
    piece = copy_graph(piece)
    for node in filter(_is_long, list(piece.graph.nodes)):
        _split(node)
    piece.recompile()
    return piece


def _is_long(node: Node) -> bool:
    """A linear without bias whose weight has far more columns than rows."""
    if node.op != "call_function" or node.target not in (torch._C._nn.linear, torch.ops.aten.linear.default):
        return False
    if len(node.args) != 2 or len(node.all_input_nodes) != 2 or any(v is not None for v in node.kwargs.values()):
        return False
    x, weight = map(value_of, node.all_input_nodes)
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)) or weight.dim() != 2:
        return False
    if not all(isinstance(s, int) and s == 1 for s in x.shape[:-2]):
        return False
    if weight.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype or not weight.is_contiguous():
        return False
    rows, columns = weight.shape
    if not (isinstance(rows, int) and isinstance(columns, int)):
        return False
    # Parts start where the vector loads of a product's kernel can.
    return (
        columns >= COLUMNS_TO_ROWS * rows
        and rows * columns * weight.element_size() >= LEAST_BYTES
        and columns % (PARTS * 64) == 0
    )


def _split(node: Node) -> None:
    graph, (x, weight) = node.graph, node.all_input_nodes
    rows, columns = value_of(weight).shape
    with graph.inserting_before(node):

        def call(target: Any, *args: Any, **kwargs: Any) -> Node:
            return graph.call_function(target, args, kwargs)

        # [PARTS, tokens, columns / PARTS] @ [PARTS, columns / PARTS, rows]: views both.
        left = call(torch.transpose, call(torch.reshape, x, (-1, PARTS, columns // PARTS)), 0, 1)
        right = call(torch.permute, call(torch.reshape, weight, (rows, PARTS, columns // PARTS)), (1, 2, 0))
        parts = call(torch.bmm, left, right, out_dtype=torch.float32)
        total = graph.call_method("to", (call(torch.sum, parts, 0), value_of(x).dtype))
        for dim in range(value_of(x).dim() - 2):  # of size one, before the tokens
            total = call(torch.unsqueeze, total, dim)
    total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
