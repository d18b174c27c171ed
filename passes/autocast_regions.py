"""Autocast as what holds at each node, not as calls before and after it: only so can a graph be cut anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fullgraph_compile.ops import SITE_OPS
from fullgraph_compile.passes.common import is_size, op_name, value_of

REGIONS = "autocast"
"""Key in a node's ``meta``: arguments of the ``torch.autocast`` regions that it is in, the outermost first."""

Regions = tuple[tuple[Any, ...], ...]


def regions_of(node: Node) -> Regions:
    return node.meta.get(REGIONS, ())


def lift_autocast(gm: GraphModule) -> GraphModule:
    """Take out the calls that enter and leave autocast; each node between them is told of it.

    Args:
        gm: is changed.
    """
    inside: list[Node] = []
    gone: list[Node] = []
    for node in gm.graph.nodes:
        name = op_name(node)
        if name == "_enter_autocast":
            inside.append(node)
            gone.append(node)
        elif name == "_exit_autocast":
            inside.remove(node.args[0])
            gone.append(node)
        elif inside:
            node.meta[REGIONS] = tuple(n.args for n in inside)
    for node in reversed(gone):
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def lower_autocast(gm: GraphModule) -> GraphModule:
    """Put the calls back around the nodes that are told of them, so that each part between two sites enters and leaves
    its own.  A site is outside of all: what it computes in is the dtype of its operands.

    Args:
        gm: is changed.
    """
    inside: list[Node] = []  # calls that enter
    for node in list(gm.graph.nodes):
        if node.op == "placeholder" or (node.op != "output" and is_size(value_of(node))):
            continue
        wanted = () if node.op == "output" or node.target in SITE_OPS else regions_of(node)
        with gm.graph.inserting_before(node):
            while inside and tuple(n.args for n in inside) != wanted[: len(inside)]:
                gm.graph.call_function(torch.amp.autocast_mode._exit_autocast, (inside.pop(),))
            for arguments in wanted[len(inside) :]:
                inside.append(gm.graph.call_function(torch.amp.autocast_mode._enter_autocast, arguments))
    gm.recompile()
    return gm
