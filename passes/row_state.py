"""What the padding proof knows about a value, and how a rule sees a call.

Every value of a graph is in one state:

- ``Uniform``: no token dim, and no element depends on a token row (weights, constants);
- ``Rows``: dim ``axis`` is the token dim, and row i depends on row i of the inputs only;
- ``Size``: a number made of sizes; it may reach a tensor as a size, never as a value;
- ``Positions``: ``arange`` over the tokens: rows whose value is their own index;
- ``Padded``: rows with more of them before or behind, on the way into or out of a causal convolution;
- ``Perm``, ``Inverse``, ``Counts``, ``Offsets``: what a sort of expert ids makes (see ``permuted_rows``);
- ``Crossed``: an input with two token dims, such as a mask, whose size may be read and nothing else;
- ``Many``: a container of states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from .common import expression, value_of


class Refused(Exception):
    """The op at hand breaks the proof, for the reason given."""


@dataclass(frozen=True)
class Uniform:
    pass


@dataclass(frozen=True)
class Size:
    pass


@dataclass(frozen=True)
class Rows:
    """Dim ``axis`` has ``tokens * inner`` rows, those of one token side by side.

    ``order`` names the sort whose order the rows are in (None: the order of the tokens); ``keys``: the values are
    still the very keys of that sort.
    """

    axis: int
    inner: int = 1
    order: Node | None = None
    keys: bool = False


@dataclass(frozen=True)
class Positions:
    origin: Node
    inner: int = 1


@dataclass(frozen=True)
class Padded:
    """Element j of dim ``axis`` depends on rows up to j - lag; ``mixed``: on earlier ones than that, too."""

    axis: int
    lag: int
    mixed: bool


@dataclass(frozen=True)
class Perm:
    """Position in the sorted order -> row in token order, divided by ``divisor``."""

    order: Node
    inner: int
    divisor: int = 1


@dataclass(frozen=True)
class Inverse:
    """Row in token order -> position in the sorted order."""

    order: Node
    inner: int


@dataclass(frozen=True)
class Counts:
    order: Node
    bins: int


@dataclass(frozen=True)
class Offsets:
    order: Node
    bins: int


@dataclass(frozen=True)
class Crossed:
    """An input whose token dims cannot be followed: two of them, or one that is not a multiple."""


@dataclass(frozen=True)
class Many:
    items: tuple[Any, ...]


State = Uniform | Size | Rows | Positions | Padded | Perm | Inverse | Counts | Offsets | Crossed | Many
UNIFORM = Uniform()
SIZE = Size()
SORTED = (Perm, Inverse, Counts, Offsets)


def symbols_of(value: Any) -> frozenset:
    """The symbols in a symbolic number or in a container of sizes."""
    if isinstance(value, (tuple, list)):
        return frozenset().union(*(symbols_of(v) for v in value))
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return frozenset(value.node.expr.free_symbols) if symbolic else frozenset()


@dataclass
class Call:
    """One call of the graph as a rule sees it: arguments by position or name, their states and shapes."""

    node: Node
    name: str
    token: sympy.Symbol
    states: dict[Node, State]
    single: Callable[[Node, str], None]
    """Records that a node's rows are those of one request only."""
    args: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.args = tuple(self.node.args)

    def arg(self, position: int, *names: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return next((self.node.kwargs[n] for n in names if n in self.node.kwargs), default)

    def rest(self, position: int, *names: str) -> list[Any]:
        """Ints given as one list or one by one: ``permute(0, 1)`` and ``permute((0, 1))``."""
        first = self.arg(position, *names)
        return list(first) if isinstance(first, (tuple, list)) else list(self.args[position:]) or [first]

    @property
    def first(self) -> Any:
        return self.arg(0, "input", "self", "tensor", "tensors", "a", "mat_a")

    @property
    def value(self) -> Any:
        return value_of(self.node)

    def raw(self, x: Any) -> State:
        return self.states[x] if isinstance(x, Node) else UNIFORM

    def state(self, x: Any) -> State:
        """The state of an argument as rows or uniform: positions become rows of one request, the rest is refused."""
        state = self.raw(x)
        if isinstance(state, Positions):
            self.single(state.origin, "rows are numbered from 0 over the whole call, so it must hold one request")
            return Rows(0, state.inner)
        if isinstance(state, Padded):
            raise Refused("works on rows that a padding or a convolution has shifted")
        if isinstance(state, SORTED):
            raise Refused("uses a sorting index or expert counts as values: they depend on every row")
        if isinstance(state, Crossed):
            raise Refused("reads an input with two token dims: every row meets every other row")
        if isinstance(state, Many):
            raise Refused("takes a container where a tensor is expected")
        return state

    def shape(self, x: Any = None) -> tuple[Any, ...]:
        value = self.value if x is None else value_of(x) if isinstance(x, Node) else x
        return tuple(expression(s) for s in value.shape) if isinstance(value, Tensor) else ()

    def ndim(self, x: Any = None) -> int:
        return len(self.shape(x))

    def tensors(self) -> list[Node]:
        return [n for n in self.node.all_input_nodes if isinstance(value_of(n), Tensor)]

    def has_token(self, size: Any) -> bool:
        return not isinstance(size, int) and self.token in size.free_symbols

    def factor(self, size: Any) -> int | None:
        """k of a dim of k * tokens; None when it is not that."""
        if size == self.token:
            return 1
        ratio = sympy.simplify(sympy.sympify(size) / self.token)
        return int(ratio) if ratio.is_Integer and ratio > 0 else None

    def mentions(self, x: Any) -> bool:
        """Whether an argument is a number made of the token count."""
        if isinstance(x, Node):
            return self.token in symbols_of(value_of(x))
        if isinstance(x, slice):
            return any(self.mentions(v) for v in (x.start, x.stop, x.step))
        if isinstance(x, (tuple, list)):
            return any(self.mentions(v) for v in x)
        return self.token in symbols_of(x)

    def number(self, x: Any) -> Any:
        """A size argument as an expression: an int, or sympy of a SymInt."""
        return expression(value_of(x)) if isinstance(x, Node) else expression(x)


def nodes_in(x: Any) -> Iterator[Node]:
    if isinstance(x, Node):
        yield x
    elif isinstance(x, slice):
        yield from nodes_in((x.start, x.stop, x.step))
    elif isinstance(x, (tuple, list)):
        for v in x:
            yield from nodes_in(v)
