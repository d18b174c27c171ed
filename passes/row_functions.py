"""The rules of the padding proof: how one call turns the states of its arguments into the state of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from . import row_checks as check
from .common import value_of
from .row_state import SIZE, SORTED, UNIFORM, Call, Many, Positions, Refused, Rows, State

Rule = Callable[[Call], State]


def norm(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def spread(call: Call, value: Any = None) -> State:
    """Rows that are all alike, where only the result's size knows of tokens; uniform where not even that does."""
    value = call.value if value is None else value
    if isinstance(value, (tuple, list)):
        return Many(tuple(spread(call, v) for v in value))
    shape = call.shape(value)
    check.one_token_dim(call, shape)
    for axis, size in enumerate(shape):
        if call.has_token(size):
            inner = call.factor(size)
            if inner is None:
                raise Refused(f"a dim has the size {size}, which is not a multiple of the token count")
            return Rows(axis, inner)
    return UNIFORM


def align(call: Call, operands: list[Any], ndim: int | None = None) -> State:
    """Operands as broadcasting pairs them, from the right; ``ndim`` of the result."""
    rows: list[Rows] = []
    places: set[tuple[int, int]] = set()
    for x in operands:
        state = call.state(x)
        if isinstance(state, Rows):
            rows.append(state)
            places.add((call.ndim(x) - state.axis, state.inner))
    if not rows:
        return UNIFORM
    check.lines_up(call, places)
    check.same_order(call, rows)
    right = call.ndim(next(x for x in operands if call.state(x) == rows[0])) - rows[0].axis
    return Rows((call.ndim() if ndim is None else ndim) - right, rows[0].inner, rows[0].order)


def elementwise(call: Call) -> State:
    if not isinstance(call.value, Tensor):
        raise Refused("the result's size depends on the data")
    return align(call, list(call.tensors()))


_EXACT = (torch.int64, torch.int32, torch.float64, torch.float32)
"""Dtypes that hold every row number and expert id."""


def cast(call: Call) -> State:
    """Another dtype, the same values: a sorting index or key stays one where the dtype can hold it."""
    check.same_device(call)
    state = call.raw(call.first)
    if isinstance(state, (*SORTED, Rows, Positions)) and getattr(call.value, "dtype", None) in _EXACT:
        return state
    state = call.state(call.first)
    return Rows(state.axis, state.inner, state.order) if isinstance(state, Rows) else state


def dropout(call: Call) -> State:
    p, training = call.arg(1, "p", default=0.5), call.arg(2, "training", "train", default=True)
    check.not_random(call, bool(training) and p != 0)
    return call.state(call.first)


def free(call: Call) -> State:
    return SIZE


def factory(call: Call) -> State:
    """zeros, empty, full: the size may be the token count, the fill value may not."""
    fill = {"full": 1, "full_like": 1, "new_full": 2}.get(call.name)
    if fill is not None:
        check.not_a_value(call, call.arg(fill, "fill_value"))
        if isinstance(call.state(call.arg(fill, "fill_value")), Rows):
            raise Refused("fills a tensor with a value of a row")
    return spread(call)


def arange(call: Call) -> State:
    numbers = [*call.args] or [call.arg(9, "end")]
    start = numbers[0] if len(numbers) > 1 else call.arg(9, "start", default=0)
    step = call.arg(2, "step", default=1)
    check.not_a_value(call, start, step)
    state = spread(call)
    if not isinstance(state, Rows):
        check.not_a_value(call, *numbers)
        return UNIFORM
    if start == 0 and step == 1:
        return Positions(call.node, state.inner)
    call.single(call.node, "rows are numbered over the whole call, so it must hold one request")
    return state


def reshape(call: Call) -> State:
    """A view in memory order: the token dim stays where the same number of elements precedes it."""
    state = call.state(call.first)
    if isinstance(call.arg(1, "dtype"), torch.dtype):
        return cast_view(call, state)
    if not isinstance(state, Rows):
        return spread(call) if state == UNIFORM else state
    return reshaped(call, state, call.shape(call.first), call.shape())


def cast_view(call: Call, state: State) -> State:
    if value_of(call.first).element_size() != call.value.element_size():
        raise Refused("reads memory as a dtype of another width")
    return Rows(state.axis, state.inner, state.order) if isinstance(state, Rows) else state


def reshaped(call: Call, state: Rows, old: tuple[Any, ...], new: tuple[Any, ...]) -> State:
    check.one_token_dim(call, new)
    axis = next((d for d, size in enumerate(new) if call.has_token(size)), None)
    inner = None if axis is None else call.factor(new[axis])
    if axis is None or inner is None or (state.order is not None and inner != state.inner):
        raise Refused("a view joins the token dim with others, so that rows can no longer be told apart")
    check.same_product(call, sympy.prod(old[: state.axis]), sympy.prod(new[:axis]))
    return Rows(axis, inner, state.order, state.keys)


def moved(call: Call, order: list[int]) -> State:
    """Dims in another order: result dim i is dim ``order[i]`` of the input."""
    state = call.state(call.first)
    return Rows(order.index(state.axis), state.inner, state.order) if isinstance(state, Rows) else state


def transpose(call: Call) -> State:
    n = call.ndim(call.first)
    a, b = (0, 1) if call.name == "t" else (call.arg(1, "dim0", "axis0"), call.arg(2, "dim1", "axis1"))
    order = list(range(n))
    if n > 1:
        a, b = norm(a, n), norm(b, n)
        order[a], order[b] = order[b], order[a]
    return moved(call, order)


def permute(call: Call) -> State:
    n = call.ndim(call.first)
    return moved(call, [norm(d, n) for d in call.rest(1, "dims")])


def movedim(call: Call) -> State:
    n = call.ndim(call.first)
    source, target = call.arg(1, "source"), call.arg(2, "destination")
    source, target = ([x] if isinstance(x, int) else list(x) for x in (source, target))
    order: list[int] = [-1] * n
    for s, t in zip(source, target, strict=True):
        order[norm(t, n)] = norm(s, n)
    left = iter(d for d in range(n) if d not in order)
    return moved(call, [next(left) if d < 0 else d for d in order])


def expand(call: Call) -> State:
    """expand, broadcast_to, repeat, tile: new dims come in front, the token dim itself must stay as it is."""
    state = call.state(call.first)
    if not isinstance(state, Rows):
        return spread(call)
    axis = state.axis + call.ndim() - call.ndim(call.first)
    check.not_along(call, axis, () if call.shape()[axis] == call.shape(call.first)[state.axis] else (axis,))
    return Rows(axis, state.inner, state.order)


def broadcast(call: Call) -> State:
    parts = call.first if isinstance(call.first, (tuple, list)) else call.args
    out = []
    for x, value in zip(parts, call.value, strict=True):
        state = call.state(x)
        shift = value.ndim - call.ndim(x)
        out.append(
            Rows(state.axis + shift, state.inner, state.order) if isinstance(state, Rows) else spread(call, value)
        )
    return Many(tuple(out))


def repeat_interleave(call: Call) -> State:
    state, times, dim = call.state(call.first), call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(times, int):
        raise Refused("the result's size depends on the data")
    if not isinstance(state, Rows):
        return state
    if dim is None:
        raise Refused("repeats a tensor in memory order, so that rows can no longer be told apart")
    if norm(dim, call.ndim()) != state.axis:
        return state
    check.same_order(call, [state, Rows(0)])
    return Rows(state.axis, state.inner * times)


def along(position: int, default: Any = None, drops: bool = False, many: bool = False) -> Rule:
    """Works along ``dim`` (argument ``position``), which may not be the token dim.

    ``drops``: the dim goes unless keepdim is set; without a dim given, the whole tensor is reduced.  ``many``: dims
    may be given one by one.
    """

    def rule(call: Call) -> State:
        state = call.state(call.first)
        if not isinstance(state, Rows):
            return spread(call)
        n = call.ndim(call.first)
        dim = call.arg(position, "dim", "axis", "dims", default=default)
        dim = call.rest(position, "dims") if many else dim
        # A bool there is another overload (``var(x, unbiased)``), which reduces all dims.
        everything = dim is None or isinstance(dim, bool) or dim in ((), [])
        dims = tuple(norm(d, n) for d in ([dim] if isinstance(dim, int) else [] if everything else dim))
        dims = tuple(range(n)) if everything else dims
        check.not_along(call, state.axis, dims)
        values = call.value if isinstance(call.value, (tuple, list)) else (call.value,)
        kept = not drops or values[0].ndim == n
        axis = state.axis if kept else state.axis - sum(d < state.axis for d in dims)
        out = Rows(axis, state.inner, state.order)
        return Many((out,) * len(values)) if isinstance(call.value, (tuple, list)) else out

    return rule


def extremum(call: Call) -> State:
    """max and min: of two tensors, or over a dim."""
    other = call.arg(1, "other")
    if isinstance(other, Node) and isinstance(value_of(other), Tensor):
        return elementwise(call)
    return along(1, drops=True)(call)


def split(call: Call) -> State:
    """chunk, split, unbind: parts along a dim that is not the token dim."""
    state = call.state(call.first)
    if not isinstance(state, Rows):
        return spread(call)
    unbind = call.name == "unbind"
    dim = norm(call.arg(1 if unbind else 2, "dim", default=0), call.ndim(call.first))
    check.not_along(call, state.axis, (dim,))
    out = Rows(state.axis - int(unbind and dim < state.axis), state.inner, state.order)
    return Many((out,) * len(call.value))


def join(call: Call) -> State:
    """cat, stack: along a dim that is not the token dim, or with nothing else in it."""
    parts = [p for p in call.first if not (call.name != "stack" and 0 in call.shape(p))]
    ndim = call.ndim(parts[0] if parts else call.first[0])
    state = align(call, parts, ndim)
    if not isinstance(state, Rows):
        return spread(call)
    dim = norm(call.arg(1, "dim", "axis", default=0), ndim + int(call.name == "stack"))
    if call.name == "stack":
        return Rows(state.axis + int(dim <= state.axis), state.inner, state.order)
    if len(parts) > 1:
        check.not_along(call, state.axis, (dim,))
    return state


def trailing(call: Call) -> State:
    """layer_norm, rms_norm: over the last dims, as many as the shape given."""
    state, n = call.state(call.first), call.ndim(call.first)
    for x in call.tensors():
        if x is not call.first and isinstance(call.state(x), Rows):
            raise Refused("its weight depends on rows")
    if isinstance(state, Rows):
        check.not_along(call, state.axis, tuple(range(n - len(call.arg(1, "normalized_shape")), n)))
    return state if not isinstance(state, Rows) else Rows(state.axis, state.inner, state.order)


def turned(call: Call) -> State:
    """``x.T`` and ``x.mT``, which newer releases of torch trace as ops."""
    return _turned(call, whole=call.name == "numpy_T")


def _turned(call: Call, *, whole: bool) -> State:
    n = call.ndim(call.first)
    return moved(call, list(reversed(range(n))) if whole else [*range(n - 2), n - 1, n - 2])


def attribute(call: Call) -> State:
    name = call.args[1]
    if name in ("T", "mT"):
        return _turned(call, whole=name == "T")
    if name in ("shape", "device", "dtype", "ndim", "is_cuda", "layout"):
        return SIZE
    if name in ("real", "imag"):
        return call.state(call.first)
    raise Refused(f"reads the attribute {name}")


def size(call: Call) -> State:
    return SIZE
