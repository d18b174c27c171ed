"""Multiply few tokens with long rows of a weight in parts of the row, so that no multiprocessor idles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fullgraph_compile.passes.common import copy_graph, value_of

# Measured on an H200 by benchmarks/products.py (docs/performance-log.md): up to so many tokens, products with weights
# of no fewer columns than rows take up to 27% less in two parts, and up to 35% less in four where the weight is small
# and has twice as many columns.  The sum of the parts is made by the kernel that reads it.
MOST_TOKENS = 128
SMALL_BYTES = 32 << 20
# Each part starts where the vector loads of a product's kernel can.
ALIGNED_COLUMNS = 64

LINEARS = (torch._C._nn.linear, torch.ops.aten.linear.default)


def split_products(piece: GraphModule) -> GraphModule | None:
    """The piece with its long products as batched ones and a sum in fp32; None where it has no such product.

    The result is rounded once, as that of the whole product is, so it is no less exact.
    """
    if not any(map(_parts_of, piece.graph.nodes)):
        return None
    piece = copy_graph(piece)
    for node in list(piece.graph.nodes):
        if parts := _parts_of(node):
            _split(node, parts)
    piece.recompile()
    return piece


def _parts_of(node: Node) -> int:
    """Into how many parts the product is to be split; 0 = it stays whole."""
    if node.op != "call_function" or node.target not in LINEARS:
        return 0
    x, weight, bias = (_tensor(operand) for operand in _operands(node))
    if x is None or weight is None or x.dtype != weight.dtype or not weight.is_contiguous():
        return 0
    if weight.dtype not in (torch.bfloat16, torch.float16) or (bias is not None and bias.dtype != weight.dtype):
        return 0
    if not all(isinstance(size, int) for size in (*weight.shape, *x.shape[:-2])) or any(s != 1 for s in x.shape[:-2]):
        return 0  # only the token dim may be more than one, or unknown
    rows, columns = weight.shape
    parts = 4 if columns >= 2 * rows and weight.nbytes < SMALL_BYTES else 2
    return parts if columns >= rows and columns % (parts * ALIGNED_COLUMNS) == 0 else 0


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear; it may have no bias, or None for one."""
    named = node.kwargs
    operands = [*node.args, *(named[name] for name in ("input", "weight", "bias") if name in named), None]
    return operands[0], operands[1], operands[2]


def _tensor(operand: Any) -> Tensor | None:
    value = value_of(operand) if isinstance(operand, Node) else None
    return value if isinstance(value, Tensor) else None


def _split(node: Node, parts: int) -> None:
    graph, (x, weight, bias) = node.graph, _operands(node)
    rows, columns = value_of(weight).shape
    with graph.inserting_before(node):

        def call(target: Any, *args: Any, **kwargs: Any) -> Node:
            return graph.call_function(target, args, kwargs)

        # [parts, tokens, columns / parts] @ [parts, columns / parts, rows]: views both.
        left = call(torch.transpose, call(torch.reshape, x, (-1, parts, columns // parts)), 0, 1)
        right = call(torch.permute, call(torch.reshape, weight, (rows, parts, columns // parts)), (1, 2, 0))
        total = call(torch.sum, call(torch.bmm, left, right, out_dtype=torch.float32), 0)
        if bias is not None:
            total = call(torch.add, total, bias)
        total = graph.call_method("to", (total, value_of(x).dtype))
        for dim in range(value_of(x).dim() - 2):
            total = call(torch.unsqueeze, total, dim)
    total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
