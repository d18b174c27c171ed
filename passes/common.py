"""What every pass reads from a traced graph: values, names, sources, and the token dim."""

from __future__ import annotations

import linecache
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fullgraph_compile import ops


@dataclass(frozen=True)
class Refusal:
    """Why a pass would not go on, in the words of the user's own source."""

    node: str
    op: str
    module: str
    source: str
    reason: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        line = f" at {self.source}" if self.source else ""
        return f"{self.op} ({self.node}){where}{line}: {self.reason}"


def refusal(node: Node, reason: str) -> Refusal:
    return Refusal(node.name, op_name(node), module_path(node), source_line(node), reason)


def value_of(node: Node) -> Any:
    """The fake value that tracing gave the node: a FakeTensor, a SymInt, a container of them, or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def op_name(node: Node) -> str:
    """One name for one op, whichever way it was spelled: ``add`` for ``operator.add``, ``Tensor.add``, ``aten.add``.

    Placeholders, outputs and attributes are named by their kind.
    """
    if node.op == "call_method":
        name = str(node.target)
        # torch 2.11 traces ``a == b`` as the method ``__eq__``.
        return name.strip("_") if name.startswith("__") and name.endswith("__") else name
    if node.op != "call_function":
        return node.op
    return target_name(node.target)


def target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name.removeprefix("aten::").removeprefix("prims::")
    name = getattr(target, "__name__", str(target))
    if getattr(target, "__module__", None) in ("_operator", "operator") or hasattr(operator, name):
        name = name.strip("_")
        return {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}.get(name, name)
    return name


def module_path(node: Node) -> str:
    """``layers.0.self_attn`` for a node that was traced inside that module, else the empty string."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"\['([^']*)'\]", r".\1", re.sub(r"^L\['\w+'\](\[\d+\])?", "", path))
    path = re.sub(r"\._modules\b", "", path)
    return path.strip(".").removeprefix("__self__.").removeprefix("self.")


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ([^\n]+)')
# Frames of this package and of torch are not where the user would look.
_NOT_THE_USERS = tuple(str(Path(file).parent) + os.sep for file in (ops.__file__, __file__, torch.__file__))


def source_line(node: Node) -> str:
    """``file:line: code`` of the user's line that made the node."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [f for f in frames if not f[0].startswith(_NOT_THE_USERS)] or frames
    if not frames:
        return ""
    path, line, _ = frames[-1]
    return f"{path}:{line}: {linecache.getline(path, int(line)).strip()}"


def is_size(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def expression(value: Any) -> Any:
    """The sympy expression of a SymInt under all replacements known to its shape environment; an int as it is."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


def free_symbols(value: Any) -> frozenset:
    """The symbols in a size."""
    return frozenset(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else frozenset()


def token_dims(tensor: Any, token: Any) -> tuple[int, ...]:
    """The dims of a tensor whose size is exactly the token symbol."""
    if not isinstance(tensor, torch.Tensor):
        return ()
    return tuple(d for d, size in enumerate(tensor.shape) if expression(size) == token)


def mentions(tensor: Any, token: Any) -> bool:
    """Whether the token symbol occurs in any size of the tensor, alone or within an expression."""
    return isinstance(tensor, torch.Tensor) and any(token in free_symbols(size) for size in tensor.shape)


def placeholders(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def output_node(gm: GraphModule) -> Node:
    return next(n for n in reversed(gm.graph.nodes) if n.op == "output")


def weight_name(node: Node) -> str:
    """The name of a weight within its module, as far as Dynamo's name for its placeholder tells."""
    name = re.sub(r"_(?:modules|parameters|buffers)_", ".", node.name).strip("._")
    return name.partition(".")[2] or name


def is_weight(node: Node, example: Any = None) -> bool:
    """Whether a placeholder or attribute holds a parameter or a buffer of the module, by how Dynamo labels it."""
    if node.op == "get_attr":
        return True
    grapharg = node.meta.get("grapharg")
    real = example if example is not None else getattr(grapharg, "_example", None)
    if isinstance(real, torch.nn.Parameter):
        return True
    if getattr(real, "_dynamo_static_input_type", None) is not None:
        return True
    value = value_of(node)
    return isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None


def find_token(gm: GraphModule, is_weight: Callable[[Node], bool]) -> tuple[Any, str]:
    """The symbol of the token count, or None and what stands in the way.

    It is the symbol of the first of the call's tensors that has one; Dynamo has unified the symbols of inputs that
    met in the graph.  A symbol of another input is that input's own matter as long as the body does not read it.
    """
    tensors = 0
    for node in placeholders(gm):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or is_weight(node):
            continue
        tensors += 1
        symbols = frozenset().union(*map(free_symbols, value.shape))
        if len(symbols) > 1:
            names = ", ".join(sorted(map(str, symbols)))
            return None, f"{node.name} has {len(symbols)} symbolic dims ({names}), so there is no one token dim"
        if symbols:
            return next(iter(symbols)), ""
    return None, "static" if tensors else "no call input is a tensor"


def copy_graph(gm: GraphModule) -> GraphModule:
    """The same graph, its nodes' names and metadata too, as an object of our own: Dynamo's is never changed."""
    graph = Graph()
    result = graph.graph_copy(gm.graph, {})
    graph.output(result)
    copied = GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    return copied
