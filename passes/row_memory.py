"""Which nodes of a graph may share memory, and which calls write to it."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from . import row_rules
from .common import op_name, value_of
from .row_functions import cast
from .row_state import nodes_in

Memory = frozenset[Hashable]
"""What memory a node may be: placeholders and fresh results, by node, or by node and item for a container."""

_INPLACE = {
    getattr(operator, f"i{name}"): name
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
}

_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "bool")


def canonical(node: Node) -> tuple[str, bool]:
    """The op's name in the table, and whether the call writes to its first argument."""
    target = node.target
    if node.op == "call_function" and target in _INPLACE:
        return _INPLACE[target], isinstance(value_of(node), Tensor)
    name = op_name(node)
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name.removeprefix("aten::")
    writes = name == "setitem" or node.kwargs.get("inplace") is True
    if name.endswith("_") and not name.endswith("__"):
        name, writes = name[:-1], True
    entry = row_rules.TABLE.get(name)
    if entry is not None and entry.inplace is not None:
        writes = writes or (len(node.args) > entry.inplace and node.args[entry.inplace] is True)
    return name, writes


def target_of(node: Node) -> Any:
    """The argument that an in-place call writes to, and that a view shows."""
    if node.args:
        return node.args[0]
    return next((node.kwargs[k] for k in ("input", "self", "tensor", "tensors") if k in node.kwargs), None)


def memory(node: Node, roots: dict[Node, Memory]) -> Memory:
    """What the node's memory may be: its own, or that of the argument that it is a view of."""
    fresh: Memory = frozenset([node])
    if not node.op.startswith("call"):
        return fresh
    name, writes = canonical(node)
    entry = row_rules.TABLE.get(name)
    source = node.args if name == "broadcast_tensors" else target_of(node)
    if name == "getitem" and isinstance(source, Node) and isinstance(value_of(source), (tuple, list)):
        if roots[source] == frozenset([source]):
            return frozenset([(source, node.args[1])])
        return roots[source]
    if not writes and not (entry and entry.view):
        return fresh
    if entry and entry.rule is cast and name in _CASTS and isinstance(source, Node):
        before, after = _dtype(source), _dtype(node)
        if before is not None and after is not None and before != after:
            return fresh  # a conversion copies
    return frozenset().union(*(roots[n] for n in nodes_in(source))) or fresh


def _dtype(node: Node) -> Any:
    return getattr(value_of(node), "dtype", None)
