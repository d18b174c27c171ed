"""Run a part of a traced graph that does index arithmetic on made-up inputs, on the CPU: in full, or some rows of it.

A mask of T x T with a window of 262144 shows that window only where T is larger, and no T x T tensor of that size can
be made.  So the part is also evaluated for a few rows: through operations whose row depends on the same row of their
operands only, down to operands that are not T x T and are computed in full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from fullgraph_compile.passes.common import expression, op_name, token_dims, value_of
from fullgraph_compile.passes.part import NotUnderstood, Part, written

_POINTWISE = frozenset({
    "add", "sub", "rsub", "mul", "floordiv", "floor_divide", "truediv", "div", "mod", "remainder", "fmod", "neg",
    "abs", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "le", "lt", "ge", "gt", "eq", "ne", "less",
    "less_equal", "greater", "greater_equal", "not_equal", "and", "or", "xor", "invert", "not", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "logical_and", "logical_or", "logical_not", "logical_xor", "where",
    "masked_fill", "to", "type", "type_as", "bool", "float", "half", "bfloat16", "long", "int", "double", "clone",
    "contiguous", "ones_like", "zeros_like", "full_like",
})  # fmt: skip
_CREATION = frozenset({
    "ones", "zeros", "full", "new_ones", "new_zeros", "new_full",
})  # fmt: skip
_DEVICES = ("cuda", "cpu", "xpu", "mps", "npu", "hpu", "mtia", "meta")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Run as plain eager code on the CPU, whatever modes and default device the compile was started under."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        yield


def concrete(size: Any, token: Any, tokens: int) -> int:
    """An int, or a SymInt of the token count alone, at ``tokens`` tokens."""
    expr = expression(size)
    if isinstance(expr, int):
        return expr
    if expr.free_symbols - {token}:
        raise NotUnderstood(f"it depends on a size {expr} that is not the token count")
    return int(expr.subs(token, tokens))


class Probe:
    """One evaluation of a part at ``tokens`` tokens.

    Args:
        part: what is run.
        token: the symbol of the token count.
        tokens: its value here.
        inputs: CPU tensors for the tensor placeholders that the part reads.
    """

    def __init__(self, part: Part, token: Any, tokens: int, inputs: dict[Node, Tensor]) -> None:
        self.nodes, self.token, self.tokens = part.nodes, token, tokens
        self.values: dict[Node, Any] = dict(inputs)
        self.partial: dict[Node, Any] = {}

    def run(self, node: Node) -> Any:
        """The node's value in full, from running every operation in the order of the graph."""
        for step in self.nodes:
            self.values[step] = self._call(step, self._leaf)
        return self.values[node]

    def run_rows(self, node: Node, rows: Tensor) -> Any:
        """The node's value at the given rows of its last but one dim, if that can be had without the others."""
        if any(written(step) for step in self.nodes):
            raise NotUnderstood("it writes in place")
        return self._rows(node, rows)

    def _leaf(self, node: Node) -> Any:
        if node not in self.values:
            self.values[node] = self._stand_in(node)
        return self.values[node]

    def _stand_in(self, node: Node) -> Any:
        """A size, or a tensor that is read for its shape and type only: one element, whatever its shape."""
        value = value_of(node)
        if isinstance(value, Tensor):
            shape = [concrete(s, self.token, self.tokens) for s in value.shape]
            return torch.zeros((), dtype=value.dtype).expand(shape)
        if isinstance(value, (int, torch.SymInt)):
            return concrete(value, self.token, self.tokens)
        raise NotUnderstood(f"it reads {node.name}, of type {type(value).__name__}")

    def _full(self, node: Node) -> Any:
        """The node's value in full, pulled from its operands."""
        if node in self.values or node not in self.nodes:
            return self._leaf(node)
        if self._square(node):
            raise NotUnderstood(f"{op_name(node)} needs all rows at once")
        self.values[node] = self._call(node, self._full)
        return self.values[node]

    def _call(self, node: Node, operand: Callable[[Node], Any]) -> Any:
        return self._apply(node, map_arg(node.args, operand), map_arg(node.kwargs, operand))

    def _apply(self, node: Node, args: Any, kwargs: Any) -> Any:
        args = map_aggregate(args, self._argument)
        kwargs = {k: "cpu" if k == "device" and v is not None else map_aggregate(v, self._argument)
                  for k, v in kwargs.items()}  # fmt: skip
        if node.op == "call_method":
            if node.target in ("cuda", "cpu"):
                return args[0]
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in _DEVICES):
            return torch.device("cpu")
        if isinstance(value, torch.SymInt):
            return concrete(value, self.token, self.tokens)
        return value

    def _square(self, node: Node) -> bool:
        """Whether the node's value is T x T in its last two dims; refuses other tensors with T more than once."""
        value = value_of(node)
        if not isinstance(value, Tensor):
            return False
        dims = token_dims(value, self.token)
        if len(dims) > 1 and dims != (value.dim() - 2, value.dim() - 1):
            raise NotUnderstood(f"{op_name(node)} has the token count in dims {dims}")
        if any(not isinstance(expression(s), int) for d, s in enumerate(value.shape) if d not in dims):
            raise NotUnderstood(f"{op_name(node)} has a size that is computed from the token count")
        return len(dims) > 1

    def _rows(self, node: Node, rows: Tensor) -> Any:
        if node in self.partial:
            return self.partial[node]
        if self._square(node):
            self.partial[node] = self._square_rows(node, rows)
        else:
            value, fake = self._full(node), value_of(node)
            cut = isinstance(fake, Tensor) and fake.dim() >= 2 and token_dims(fake, self.token) == (fake.dim() - 2,)
            self.partial[node] = value.index_select(-2, rows) if cut else value
        return self.partial[node]

    def _square_rows(self, node: Node, rows: Tensor) -> Any:
        if node not in self.nodes:
            return self._stand_in(node)[..., : len(rows), :]
        name = op_name(node)
        if name in _POINTWISE:
            return self._call(node, lambda n: self._rows(n, rows))
        if name in _CREATION:
            args = map_arg((node.args, dict(node.kwargs)), self._full)
            return self._apply(node, *_with_rows(args, len(rows)))
        first = node.args[0] if node.args else None
        if not isinstance(first, Node):
            raise NotUnderstood(f"{name} needs all rows at once")
        rest: Any = map_aggregate(map_arg(node.args[1:], self._full), self._argument)
        if name in ("tril", "triu"):
            offset: Any = rest[0] if rest else node.kwargs.get("diagonal", 0)
            distance = torch.arange(self.tokens) - rows[:, None]
            drop = distance > offset if name == "tril" else distance < offset
            return self._rows(first, rows).masked_fill(drop, 0)
        if name == "expand":
            return self._rows(first, rows).expand(_sizes(rest, len(rows)))
        if self._square(first) and name in ("view", "reshape"):
            return self._rows(first, rows).reshape(_sizes(rest, len(rows)))
        if self._square(first) and name == "unsqueeze" and 0 <= rest[0] <= value_of(first).dim() - 2:
            return self._rows(first, rows).unsqueeze(rest[0])
        if self._square(first) and name == "getitem":
            return self._rows(first, rows)[self._whole_slices(rest[0])]
        raise NotUnderstood(f"{name} needs all rows at once")

    def _whole_slices(self, index: Any) -> Any:
        """An index that only adds dims; slices must keep everything."""
        whole = (slice(None), slice(None, self.tokens), slice(0, self.tokens))
        parts = index if isinstance(index, tuple) else (index,)
        if not all(p is None or p is Ellipsis or (isinstance(p, slice) and p in whole) for p in parts):
            raise NotUnderstood("getitem needs all rows at once")
        return tuple(slice(None) if isinstance(p, slice) else p for p in parts)


def _sizes(rest: Any, rows: int) -> list[int]:
    sizes = list(rest[0]) if isinstance(rest[0], (tuple, list, torch.Size)) else list(rest)
    sizes[-2] = rows
    return sizes


def _with_rows(call: Any, rows: int) -> Any:
    """The arguments of ones, zeros, full, new_ones ... with the last but one size replaced."""
    args, kwargs = call
    if "size" in kwargs:
        return args, {**kwargs, "size": _sizes([kwargs["size"]], rows)}
    at = next(i for i, a in enumerate(args) if not isinstance(a, Tensor))
    if isinstance(args[at], (tuple, list)):
        return (*args[:at], _sizes([args[at]], rows), *args[at + 1 :]), kwargs
    return (*args[:at], *_sizes(args[at:], rows)), kwargs
