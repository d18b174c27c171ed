"""Python floats that Dynamo made into inputs (``dynamic=True``) become constants again, each under a guard."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fullgraph_compile.passes.common import op_name, value_of


def fold_scalars(gm: GraphModule) -> GraphModule:
    """Replace ``item()`` of a 0-d CPU input by its value.

    Taking ``float()`` of the symbolic number makes Dynamo guard on it, so that another value compiles anew; taking
    the number from the example tensor would leave the old value in place, silently.
    """
    graph = gm.graph
    for node in list(graph.nodes):
        if op_name(node) != "item" or node.args[0].op != "placeholder":
            continue
        number = value_of(node)
        if free_unbacked_symbols(number):
            continue  # the module's own ``item()``: Dynamo does not know the value either
        constant = number if isinstance(number, (int, float, bool)) else _concrete(number)
        for user in list(node.users):
            user.replace_input_with(node, constant)
        graph.erase_node(node)
    _fold_constant_sizes(gm)
    gm.recompile()
    return gm


def _concrete(number: object) -> object:
    import torch

    if isinstance(number, torch.SymFloat):
        return float(number)
    if isinstance(number, torch.SymBool):
        return bool(number)
    return int(number)  # type: ignore[call-overload]


def _fold_constant_sizes(gm: GraphModule) -> None:
    """Numbers computed from folded numbers alone are numbers too."""
    import torch

    for node in list(gm.graph.nodes):
        if (
            node.op != "call_function"
            or node.all_input_nodes
            or not isinstance(value_of(node), (torch.SymFloat, torch.SymInt, torch.SymBool))
        ):
            continue
        constant = node.target(*node.args, **node.kwargs)
        for user in list(node.users):
            user.replace_input_with(node, constant)
        gm.graph.erase_node(node)
