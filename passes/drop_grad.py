"""Leave out what only marks tensors for a gradient: nothing is differentiated in a graph of ours."""

from __future__ import annotations

from torch.fx import GraphModule

from fullgraph_compile.passes.common import op_name

# How Dynamo traces the first it puts between two of the second.
_MARKS, _ALLOWS = "requires_grad_", "set_inplace_requires_grad_allowed"


def drop_grad(gm: GraphModule) -> GraphModule:
    """Take ``requires_grad_`` for its tensor, as peft's and transformers' ``enable_input_require_grads`` calls it.

    Args:
        gm: is changed.
    """
    for node in list(gm.graph.nodes):
        name = op_name(node)
        if name == _MARKS:
            node.replace_all_uses_with(node.args[0])
        if name in (_MARKS, _ALLOWS):
            gm.graph.erase_node(node)
    gm.recompile()
    return gm
