"""The part of a traced graph that decides one value: which operations, in-place writes included, and which inputs."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fullgraph_compile.passes.common import is_size, is_weight, op_name, value_of, weight_name

# Operations that read the shape, type or device of their first operand, never its values.
METADATA_ONLY = frozenset({
    "new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like", "size",
    "sym_size", "sym_size.int", "dim", "sym_numel", "numel",
})  # fmt: skip
_RANDOM = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform_", "random_", "exponential_", "dropout", "dropout_",
    "alpha_dropout", "feature_dropout", "poisson", "empty", "empty_like", "new_empty", "empty_strided",
    "empty_permuted",
})  # fmt: skip


class NotUnderstood(Exception):
    """Why an attention call cannot become a site."""


@dataclass(frozen=True)
class Part:
    """Operations in graph order, and the tensor placeholders whose values they read.

    Sizes, and tensors that are read for their shape, type or device alone, are in neither.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]


def part_of(mask: Node, before: Node) -> Part:
    """Everything that decides the value of ``mask`` when ``before``, which reads it, runs; in-place writes included.

    Raises:
        NotUnderstood: it reads a weight or float values of the call, or uses what is not index arithmetic.
    """
    earlier: list[Node] = []
    for node in mask.graph.nodes:
        if node is before:
            break
        earlier.append(node)
    writers = [n for n in earlier if written(n)]
    inside: set[Node] = set()
    pending = [mask]
    while pending:
        _reach(pending, inside)
        storages = {_storage(n) for n in inside} - {None}
        pending = [w for w in writers if w not in inside and any(_storage(t) in storages for t in written(w))]
    nodes = tuple(n for n in earlier if n in inside and n.op != "placeholder")
    return Part(nodes, tuple(n for n in earlier if n in inside and n.op == "placeholder"))


def _reach(pending: list[Node], inside: set[Node]) -> None:
    """Add the pending nodes and all that decides their values to ``inside``."""
    while pending:
        node = pending.pop()
        if node in inside or (node.op == "placeholder" and is_size(value_of(node))):
            continue
        inside.add(node)
        if node.op == "placeholder":
            _check_input(node)
        else:
            _check_operation(node)
            pending += _read(node)


def _read(node: Node) -> list[Node]:
    """Operands whose values decide the node's value."""
    if op_name(node) not in METADATA_ONLY or not node.args:
        return node.all_input_nodes
    found: list[Node] = []
    map_arg((node.args[1:], dict(node.kwargs)), found.append)
    return found


def _check_input(node: Node) -> None:
    value = value_of(node)
    if is_weight(node):
        raise NotUnderstood(f"it is computed from the weight or buffer {weight_name(node)}")
    if not isinstance(value, Tensor):
        raise NotUnderstood(f"it is computed from {node.name}, of type {type(value).__name__}")
    if value.is_floating_point() or value.is_complex():
        raise NotUnderstood(f"it is computed from the values of {node.name} ({value.dtype})")


def _storage(node: Node) -> int | None:
    value = value_of(node)
    while isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)  # it has no storage of its own
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _check_operation(node: Node) -> None:
    """Refuse attributes of the graph, custom and higher-order operations, functorch levels and random numbers.

    A part is run by itself later, so nothing with an effect or a state of its own may be in it.
    """
    if node.op not in ("call_function", "call_method"):
        raise NotUnderstood(f"it reads {node.target}, which is not an argument of the call")
    target = node.target
    name = op_name(node)
    if name.split("::")[-1] in _RANDOM:
        raise NotUnderstood(f"it uses {name}, which gives no fixed value")
    if node.op == "call_method":
        return
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace in ("aten", "prims"):
            return
    elif not isinstance(target, torch._ops.OperatorBase):
        module = str(getattr(target, "__module__", None) or getattr(target, "__self__", None))
        known = module.startswith(("torch", "_operator", "operator", "math", "builtins", "<class 'torch"))
        if known and not any(part in module for part in ("functorch", "_dynamo", "_higher_order", "distributed")):
            return
    raise NotUnderstood(f"it uses {name}, which is not an operation on indices")


def written(node: Node) -> list[Node]:
    """Operands that the node writes to."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        names = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        order = [a.name for a in target._schema.arguments]
        given = {**dict(zip(order, node.args, strict=False)), **node.kwargs}
        return [given[n] for n in names if isinstance(given.get(n), Node)]  # type: ignore[misc]
    found: list[Any] = [node.kwargs.get("out")]
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    plain_operator = getattr(target, "__module__", "") == "_operator"
    trailing = name.endswith("_") and not name.endswith("__") and not plain_operator
    if (trailing or target in _PYTHON_IN_PLACE or node.kwargs.get("inplace")) and node.args:
        found.append(node.args[0])
    return [n for n in found if isinstance(n, Node)]


_PYTHON_IN_PLACE = frozenset(
    getattr(operator, n)
    for n in ["setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "iand", "ior", "ixor", "ipow"]
)


def remove_unread(graph: Graph, removable: Iterable[Node]) -> None:
    """Remove nodes that nothing outside of ``removable`` needs; a write is needed if what it writes to is."""
    removable = set(removable)
    writes = [n for n in removable if written(n)]
    needed: set[Node] = set()
    storages: set[int | None] = set()
    pending = [n for n in graph.nodes if n not in removable]
    while pending:
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        storages = {_storage(n) for n in needed} - {None}
        pending = [w for w in writes if w not in needed and any(_storage(t) in storages for t in written(w))]
    for node in reversed(list(graph.nodes)):
        if node in removable and node not in needed:
            graph.erase_node(node)
