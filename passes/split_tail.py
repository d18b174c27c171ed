"""Cut the traced graph into the body, which a graph replays, and the tail, which runs on real rows only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fullgraph_compile.ops import attention
from fullgraph_compile.passes.check_row_independence import Proof
from fullgraph_compile.passes.common import is_size, output_node, placeholders, token_dims, value_of
from fullgraph_compile.passes.part import remove_unread


@dataclass(frozen=True)
class Split:
    """A body and a tail.

    ``body`` has the placeholders of the traced graph and returns the tensors that cross the cut, a flat tuple.
    ``tail`` takes those tensors and then the placeholders ``tail_inputs``, by index, and returns what the traced graph
    returned; it has ``tail_ops`` ops.
    """

    body: GraphModule
    tail: GraphModule
    crossing: tuple[str, ...]
    tail_inputs: tuple[int, ...]
    tail_ops: int


def split_tail(gm: GraphModule, proof: Proof) -> Split:
    """Cut after the last attention call, where the fewest bytes per row cross; of equal cuts, the latest.

    A node that the proof refused, and all that depends on it, belongs to the tail.  A tensor may cross only if the
    proof has it in rows, as it is cut to the real rows there.
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    last_site = max((i for i, n in enumerate(nodes) if n.target is attention), default=-1)
    beyond = {n.name for n in nodes if n.name in proof.tainted or _about_other_sizes(n, proof.token)}
    best: tuple[float, int] | None = None
    for cut in range(len(nodes) - 1, last_site - 1, -1):
        cost = _bytes_per_row(_crossing(nodes, cut, beyond), proof)
        if cost is not None and (best is None or cost < best[0]):
            best = (cost, cut)
    if best is None:
        raise ValueError("no cut after the last attention call has all of its tensors in rows")
    body_nodes = {n for i, n in enumerate(nodes) if i <= best[1] and n.name not in beyond}
    crossing = _crossing(nodes, best[1], beyond)
    body = _body(gm, body_nodes, crossing)
    return Split(body, *_tail(gm, body_nodes, crossing))


def whole_body(gm: GraphModule) -> Split:
    """The whole graph as the body; the tail only puts the outputs in order."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    inside = set(nodes)
    crossing = [n for n in output_node(gm).all_input_nodes if n in inside and not is_size(value_of(n))]
    return Split(_body(gm, inside, crossing), *_tail(gm, inside, crossing))


def _about_other_sizes(node: Node, token: Any) -> bool:
    """Whether the node computes or asserts something of a size other than the token count, as of an index tensor
    that only the tail reads."""
    values = [value_of(node), *map(value_of, node.all_input_nodes)]
    sizes = [v for v in values if isinstance(v, (torch.SymInt, torch.SymBool))]
    if len(sizes) < len([v for v in values if v is not None]):
        return False
    return any(v.node.expr.free_symbols - {token} for v in sizes)


def _crossing(nodes: list[Node], cut: int, beyond: set[str]) -> list[Node]:
    """Nodes of the body that the tail or the output reads; sizes are computed again instead."""
    inside = {n for i, n in enumerate(nodes) if i <= cut and n.name not in beyond}
    return [n for n in nodes if n in inside and not is_size(value_of(n)) and any(u not in inside for u in n.users)]


def _bytes_per_row(crossing: list[Node], proof: Proof) -> float | None:
    total = 0.0
    for node in crossing:
        value = value_of(node)
        if node.name not in proof.rows or not isinstance(value, torch.Tensor):
            return None
        dims = token_dims(value, proof.token)
        if len(dims) != 1 or any(
            is_size(s) and not isinstance(s, int) for d, s in enumerate(value.shape) if d not in dims
        ):
            return None
        total += math.prod(s for d, s in enumerate(value.shape) if d not in dims) * value.element_size()
    return total


def _body(gm: GraphModule, inside: set[Node], crossing: list[Node]) -> GraphModule:
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in inside:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in crossing))
    return _module(gm, graph)


def _tail(
    gm: GraphModule, inside: set[Node], crossing: list[Node]
) -> tuple[GraphModule, tuple[str, ...], tuple[int, ...], int]:
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in crossing:
        env[node] = graph.placeholder(f"rows_{node.name}")
        env[node].meta = dict(node.meta)
    for node in placeholders(gm):
        env[node] = graph.node_copy(node)
    ops = 0

    def needed(node: Node) -> Node:
        """A size that the body computed is computed again here, from the real token count."""
        if node not in env:
            env[node] = graph.node_copy(node, needed)
        return env[node]

    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or node in inside:
            continue
        env[node] = graph.node_copy(node, needed)
        ops += 1
    graph.output(map_arg(cast(Any, output_node(gm).args[0]), needed))
    # What the tail does not return it need not compute: assertions on sizes, mostly.
    remove_unread(graph, [n for n in graph.nodes if n.op not in ("placeholder", "output")])
    read = []
    for i, node in enumerate(placeholders(gm)):
        if env[node].users:
            read.append(i)
        else:
            graph.erase_node(env[node])
    return _module(gm, graph), tuple(n.name for n in crossing), tuple(read), ops


def _module(gm: GraphModule, graph: Graph) -> GraphModule:
    module = GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    return module
