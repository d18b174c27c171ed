"""Make one linear of those that read the same input: query, key and value, or gate and up."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fullgraph_compile.ops import attention
from fullgraph_compile.passes.autocast_regions import regions_of
from fullgraph_compile.passes.common import copy_graph, expression, module_path, output_node, value_of
from fullgraph_compile.passes.part import written

Stack = tuple[int, ...]
"""Placeholders, by index, whose tensors lie one after the other along their first dim."""

log = logging.getLogger("fullgraph_compile")


@dataclass(frozen=True)
class Fusion:
    """A body with fewer linears.

    Attributes:
        body: has the placeholders of the body that was given, but the first of each stack stands for the whole stack,
            and the others have no users.
        stacks: what the first placeholder of each stands for.
    """

    body: GraphModule
    stacks: tuple[Stack, ...]


@dataclass(frozen=True)
class _Linear:
    node: Node
    weight: Node
    bias: Node | None


def fuse_projections(body: GraphModule, admit: Callable[[Sequence[Stack]], bool]) -> Fusion:
    """Fuse linears that read the same node, are siblings in one module, and lie between the same attention calls.

    A linear is a row-wise op whatever the number of its features, and each part of a fused result is a slice of
    features, so a proof of the body given holds for the one returned.

    Args:
        body: returns a flat tuple; it is not changed.
        admit: whether the tensors of these placeholders may be stacked; asked once for each group of linears, with a
            stack of weights and, where the linears have them, a stack of biases.  What it admits is fused.
    """
    body = copy_graph(body)
    index = {n: i for i, n in enumerate(n for n in body.graph.nodes if n.op == "placeholder")}
    order = {n: float(i) for i, n in enumerate(body.graph.nodes)}
    stacks: list[Stack] = []
    for group in _groups(body):
        parts = [[linear.weight for linear in group]]
        if group[0].bias is not None:
            parts.append([linear.bias for linear in group if linear.bias is not None])
        try:
            whole, values = _values(group, parts, order)
        except Exception as error:
            # A consumer that cannot read rows which are not contiguous, or cannot say so in symbols.
            log.info("%s stays apart: %s", group[0].node.name, str(error).splitlines()[:1])
            continue
        asked = [tuple(index[n] for n in part) for part in parts]
        if admit(asked):
            _rewrite(group, parts, whole, values, order)
            stacks += asked
    body.recompile()
    return Fusion(body, tuple(stacks))


# -- which -----------------------------------------------------------------------------------------------------------


def _groups(body: GraphModule) -> list[list[_Linear]]:
    """Groups of two or more, in graph order."""
    returned = {_storage(value_of(n)) for n in output_node(body).all_input_nodes}
    writes: dict[Any, list[int]] = {}
    found: dict[Any, list[_Linear]] = {}
    piece = 0
    at: dict[Node, int] = {}
    for i, node in enumerate(body.graph.nodes):
        at[node] = i
        piece += node.target is attention
        for target in written(node):
            writes.setdefault(_storage(value_of(target)), []).append(i)
        linear = _linear(node)
        if linear is None or regions_of(node):
            continue  # in a region of autocast its result is of another dtype
        x, weight = node.args[0], value_of(linear.weight)
        form = (weight.dtype, weight.device, weight.shape[1], linear.bias is None)
        found.setdefault((x, piece, _owner(node), form), []).append(linear)
    groups = []
    for (x, *_), group in found.items():
        # A result that is returned, or written to, must have memory of its own.
        group = [g for g in group if (s := _storage(value_of(g.node))) not in returned and s not in writes]
        between = range(at[group[0].node], at[group[-1].node]) if group else range(0)
        if len(group) > 1 and not any(i in between for i in writes.get(_storage(value_of(x)), ())):
            groups.append(group)
    return groups


def _linear(node: Node) -> _Linear | None:
    """The node as ``x @ weight.T + bias`` with weights that nothing else reads."""
    if node.op != "call_function" or node.target not in (torch._C._nn.linear, torch.ops.aten.linear.default):
        return None
    if set(node.kwargs) - {"bias"} or not 2 <= len(node.args) <= 3:
        return None
    x, weight = node.args[:2]
    bias = node.args[2] if len(node.args) == 3 else node.kwargs.get("bias")
    if not isinstance(x, Node) or not isinstance(value_of(x), Tensor) or not _is_part(weight, 2):
        return None
    if bias is not None and not _is_part(bias, 1):
        return None
    return _Linear(node, weight, bias)  # type: ignore[arg-type]


def _is_part(node: Any, dims: int) -> bool:
    if not isinstance(node, Node) or node.op != "placeholder" or len(node.users) != 1:
        return False
    value = value_of(node)
    return isinstance(value, Tensor) and value.dim() == dims and all(isinstance(s, int) for s in value.shape)


def _owner(node: Node) -> str:
    """The module that the linear, or the module that it is, is a part of.

    Adapters of different projections read one input too, but their results go different ways at once.
    """
    path = module_path(node)
    stack = node.meta.get("nn_module_stack")
    kind = str(list(stack.values())[-1][1]) if stack else ""
    return path.rpartition(".")[0] if "Linear" in kind else path


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


# -- what it gives ---------------------------------------------------------------------------------------------------


def _values(
    group: list[_Linear], parts: list[list[Node]], order: dict[Node, float]
) -> tuple[tuple[list[Tensor], Tensor], dict[Node, Any]]:
    """Fake values after fusing: those of the stacks and of the fused result, and those of nodes that change.

    Results become slices of features, so rows are not contiguous, and what reads them may have other strides too.
    """
    first = group[0].node
    read: Any = first.args[0]
    x = value_of(read)
    # torch 2.11 decomposes a linear of symbolic size in Python only.
    with enable_python_dispatcher(), x.fake_mode, torch.no_grad():
        stacks = []
        for part in parts:
            like = value_of(part[0])
            rows = sum(value_of(n).shape[0] for n in part)
            stacks.append(torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device))
        fused = torch._C._nn.linear(x, *stacks)
        values: dict[Node, Any] = {}
        start = 0
        for linear in group:
            size = value_of(linear.weight).shape[0]
            values[linear.node] = fused.narrow(-1, start, size)
            start += size
        _follow(values, order)
    return (stacks, fused), values


def _follow(values: dict[Node, Any], order: dict[Node, float]) -> None:
    """Add the nodes whose strides, or whose memory, are others with these values of their operands."""
    pending = [(order[u], u) for n in values for u in n.users if u in order]
    heapq.heapify(pending)
    done: set[Node] = set()
    while pending:
        _, node = heapq.heappop(pending)
        if node in done or node.op == "output" or node.target is attention:
            continue  # attention returns rows of its own
        done.add(node)
        old = value_of(node)
        if not isinstance(old, (Tensor, tuple, list)) or isinstance(old, torch.Size):
            continue  # shapes are the same
        new = _run(node, values)
        if isinstance(old, Tensor) and _same_layout(old, new) and not _views_operand(node, new, values):
            continue
        values[node] = new
        for user in node.users:
            heapq.heappush(pending, (order[user], user))


def _run(node: Node, values: dict[Node, Any]) -> Any:
    given: Any = (node.args, dict(node.kwargs))
    args, kwargs = map_arg(given, lambda n: values[n] if n in values else value_of(n))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    raise ValueError(f"{node.op} cannot be run")


def _same_layout(old: Tensor, new: Tensor) -> bool:
    if old.dtype != new.dtype or list(map(expression, old.shape)) != list(map(expression, new.shape)):
        raise ValueError("fusing changes a result")
    return list(map(expression, old.stride())) == list(map(expression, new.stride()))


def _views_operand(node: Node, new: Tensor, values: dict[Node, Any]) -> bool:
    shown = [values[n] for n in node.all_input_nodes if n in values]
    leaves = [t for v in shown for t in (v if isinstance(v, (tuple, list)) else [v])]
    return _storage(new) in map(_storage, leaves)


def _rewrite(
    group: list[_Linear],
    parts: list[list[Node]],
    whole: tuple[list[Tensor], Tensor],
    values: dict[Node, Any],
    order: dict[Node, float],
) -> None:
    graph = group[0].node.graph
    stacks, fused = whole
    for node, value in values.items():
        node.meta["example_value"] = value
    for part, stack in zip(parts, stacks, strict=True):
        part[0].meta = {**part[0].meta, "example_value": stack}
        part[0].meta.pop("grapharg", None)  # its example is the first part alone
    first = group[0].node
    with graph.inserting_before(first):
        linear = graph.call_function(torch._C._nn.linear, (first.args[0], *(part[0] for part in parts)))
    linear.meta = {**first.meta, "example_value": fused}
    order[linear] = order[first]
    start = 0
    previous = linear
    for member in group:
        size = values[member.node].shape[-1]
        with graph.inserting_after(previous):
            rows = graph.call_function(torch.narrow, (linear, -1, start, size))
        rows.meta = dict(member.node.meta)
        order[rows] = math.nextafter(order[previous], math.inf)
        member.node.replace_all_uses_with(rows)
        graph.erase_node(member.node)
        previous, start = rows, start + size
