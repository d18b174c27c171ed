"""Autocast as what holds at each node, not as calls before and after it: only so can a graph be cut anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def forward_of(gm: GraphModule) -> Callable[..., Any]:
    """The graph as it was traced; what it raises within a region leaves autocast as it was."""
    if not any(op_name(n) == "_enter_autocast" for n in gm.graph.nodes):
        return gm.forward

    def forward(*args: Any) -> Any:
        with unwound(gm):
            return gm.forward(*args)

    return forward


@contextmanager
def unwound(gm: GraphModule) -> Iterator[None]:
    """Around a run of the graph, or a trace of it: what is raised within a region leaves autocast as it was."""
    devices = {str(n.args[0]) for n in gm.graph.nodes if op_name(n) == "_enter_autocast"}
    was = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    cached = torch.is_autocast_cache_enabled()
    # Torch tells how deep it is only as it changes that.
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    try:
        yield
    except BaseException:
        for device, enabled, dtype in was:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > depth:
            pass
        if depth == 0:
            torch.clear_autocast_cache()
        raise
