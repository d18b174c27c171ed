"""Round where the traced code rounds, though the compiler fuses what is before with what is after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from fullgraph_compile.passes.common import op_name, value_of

# The bits of a float32 that a bfloat16 does not have, and the most that they say.
_DROPPED, _HALF = 16, 0x7FFF


def keep_rounding(gm: GraphModule) -> GraphModule:
    """Make each result that the graph computes in float32 and rounds to bfloat16 one that is rounded.

    A compiler that fuses ``x.to(bfloat16)`` with what reads it goes on with ``x`` itself.  That is nearer to the exact
    result, and another one than that of kernels which write their results to memory between them.  Values that were not
    computed from half precision, as a table of angles, are left as they are.

    Args:
        gm: is changed.
    """
    tracer = GraphAppendingTracer(gm.graph)
    for node in list(gm.graph.nodes):
        if _rounds(node):
            source = node.args[0]
            # As torch's own ops: torch's caches of what was compiled know no function of another package.
            with gm.graph.inserting_before(node):
                rounded = round_to_bfloat16(Proxy(source, tracer)).node
            rounded.meta = {**node.meta, "example_value": value_of(source)}
            node.replace_input_with(source, rounded)
    gm.recompile()
    return gm


def round_to_bfloat16(x: Any) -> Any:
    """A float32 tensor with each number rounded to the nearest that a bfloat16 can be, ties to even; still float32.

    By arithmetic on bits, which no compiler takes for a cast that it may leave out.
    """
    bits = x.view(torch.int32)
    rounded = (bits + (_HALF + ((bits >> _DROPPED) & 1))) & (-1 << _DROPPED)
    # What is no number must stay none: its bits could be carried into the sign.
    return torch.where(x == x, rounded.view(torch.float32), x)


def _rounds(node: Node) -> bool:
    if op_name(node) != "to" or not node.args or not isinstance(node.args[0], Node):
        return False
    value, source = value_of(node), value_of(node.args[0])
    if not isinstance(value, Tensor) or not isinstance(source, Tensor):
        return False
    return value.dtype == torch.bfloat16 and source.dtype == torch.float32 and _of_half(node.args[0])


def _of_half(node: Node) -> bool:
    """Whether it is computed from a tensor in bfloat16."""
    seen, pending = {node}, [node]
    while pending:
        for parent in pending.pop().all_input_nodes:
            value = value_of(parent)
            if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                return True
            if parent not in seen:
                seen.add(parent)
                pending.append(parent)
    return False
