"""Rules of the padding proof for indexing: which rows an index takes, and where the token dim ends up."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from . import row_checks as check
from .common import value_of
from .permuted_rows import inverted, takes_permuted
from .row_functions import align, norm
from .row_products import settle
from .row_state import SIZE, UNIFORM, Call, Many, Padded, Refused, Rows, Size, State


def getitem(call: Call) -> State:
    source, index = call.args[0], call.args[1]
    state = call.raw(source)
    if isinstance(state, Many):
        return Many(state.items[index]) if isinstance(index, slice) else state.items[index]
    if isinstance(state, Size):
        return SIZE
    return indexed(call, source, index)[0]


def is_tensor(x: Any) -> bool:
    return isinstance(x, Node) and isinstance(value_of(x), Tensor)


def indexed(call: Call, source: Any, index: Any) -> tuple[State, int]:
    """State and number of dims of ``source[index]``."""
    items = list(index) if isinstance(index, (tuple, list)) else [index]
    for x in items:
        check.no_mask(call, x)
        if isinstance(x, bool) or (is_tensor(x) and call.ndim(x) == 0):
            raise Refused("an index of this kind is not understood")
    n = call.ndim(source)
    if Ellipsis in [x for x in items if not isinstance(x, Node)]:
        at = next(i for i, x in enumerate(items) if x is Ellipsis)
        taken = sum(x is not None and x is not Ellipsis for x in items)
        items[at : at + 1] = [slice(None)] * (n - taken)
    items += [slice(None)] * (n - sum(x is not None for x in items))
    items = without_lists(call, source, items)
    if any(is_tensor(x) for x in items):
        return advanced(call, source, items)
    return basic(call, source, items)


def without_lists(call: Call, source: Any, items: list[Any]) -> list[Any]:
    """A list of numbers over another dim than that of the rows stays in its place, as a slice would."""
    lists = [i for i, x in enumerate(items) if isinstance(x, list)]
    if not lists:
        return items
    state = call.raw(source)
    state = state if isinstance(state, Padded) else call.state(source)
    dim = sum(x is not None for x in items[: lists[0]])
    over_rows = isinstance(state, (Rows, Padded)) and dim == state.axis
    numbers = all(isinstance(i, int) and not isinstance(i, bool) for i in items[lists[0]])
    others = [x for i, x in enumerate(items) if i != lists[0]]
    if over_rows or not numbers or not all(x is None or isinstance(x, slice) for x in others):
        raise Refused("an index of this kind is not understood")
    return [slice(None) if isinstance(x, list) else x for x in items]


def basic(call: Call, source: Any, items: list[Any]) -> tuple[State, int]:
    """None, ints and slices only."""
    state = call.raw(source)
    state = state if isinstance(state, Padded) else call.state(source)
    shape, dim, out, axis = call.shape(source), 0, 0, -1
    sliced: list[tuple[int, slice]] = []
    for x in items:
        if x is not None and isinstance(state, (Rows, Padded)) and dim == state.axis:
            axis = out
            if isinstance(state, Padded):
                state = shifted(call, state, x)
            else:
                check.whole(call, x, shape[dim])
                out -= int(not isinstance(x, slice))
        elif isinstance(x, slice):
            check.not_a_value(call, x.start, x.step)
            sliced += [(out, x)] if call.mentions(x.stop) else []
        else:
            check.not_a_value(call, x)
        dim += int(x is not None)
        out += int(x is None or isinstance(x, slice))
    if isinstance(state, Rows):
        state = Rows(max(axis, 0), state.inner, state.order, state.keys)
    elif isinstance(state, Padded):
        state = settle(call, Padded(axis, state.lag, state.mixed), 0, False)
    elif sliced:
        # w[:tokens]: row i is w[i], a position counted from the call's first row.
        call.single(call.node, "takes a table's first rows, one a token, so the call must hold one request")
        state = Rows(sliced[0][0])
        if call.shape()[state.axis] != call.token:
            raise Refused("takes as many rows of a table as there are tokens, but it may have fewer")
    return state, out


def shifted(call: Call, state: Padded, x: Any) -> Padded:
    if not isinstance(x, slice) or x.step not in (None, 1) or not isinstance(x.start, (int, type(None))):
        raise Refused("picks rows by their place in the call")
    if (x.start or 0) < 0:
        raise Refused("counts rows from the end of the call")
    return Padded(state.axis, state.lag - (x.start or 0), state.mixed)


def advanced(call: Call, source: Any, items: list[Any]) -> tuple[State, int]:
    """One or more index tensors side by side, and slices."""
    where = [i for i, x in enumerate(items) if is_tensor(x)]
    for i, x in enumerate(items):
        if i not in where and not (x is None or isinstance(x, slice)):
            raise Refused("a number beside an index tensor is not understood")
        if isinstance(x, slice) and x != slice(None):
            raise Refused("a slice beside an index tensor is not understood")
    if where != list(range(where[0], where[-1] + 1)):
        raise Refused("index tensors that are not side by side are not understood")
    tensors = [items[i] for i in where]
    width = max(call.ndim(x) for x in tensors)
    ndim = len(items) - len(tensors) + width
    taken = [sum(x is not None for x in items[:i]) for i in where]
    if len(tensors) == 1:
        permuted = takes_permuted(call, source, tensors[0], taken[0])
        if permuted is not None:
            return permuted, ndim
    base, rows = call.state(source), align(call, tensors, width)
    if not isinstance(base, Rows):
        if isinstance(rows, Rows):
            return Rows(where[0] + rows.axis, rows.inner, rows.order), ndim
        return UNIFORM, ndim
    check.no_row_gather(call, isinstance(rows, Rows) or base.axis in taken)
    place = [i for i, x in enumerate(items) if x is not None].index(base.axis)
    return Rows(place + (width - len(tensors) if place > where[-1] else 0), base.inner, base.order), ndim


def setitem(call: Call) -> State:
    """``x[index] = value``: the state of x afterwards."""
    source, index, value = call.args
    inverse = inverted(call, source, index, value)
    if inverse is not None:
        return inverse
    state = call.state(source)
    check.no_row_gather(call, any(isinstance(call.raw(n), Rows) for n in nodes_of(index)))
    check.not_a_value(call, value, None if isinstance(state, Rows) else index)
    part, ndim = indexed(call, source, index)
    given = call.state(value) if is_tensor(value) else UNIFORM
    if isinstance(given, Rows):
        here = (ndim - part.axis, part.inner) if isinstance(part, Rows) else None
        if here is None or not isinstance(part, Rows) or not isinstance(state, Rows):
            raise Refused("writes rows into a tensor that has none")
        check.lines_up(call, {here, (call.ndim(value) - given.axis, given.inner)})
        check.same_order(call, [part, given])
    if isinstance(state, Rows):
        return Rows(state.axis, state.inner, state.order)
    return state


def nodes_of(index: Any) -> list[Node]:
    return [x for x in (index if isinstance(index, (tuple, list)) else [index]) if is_tensor(x)]


def select(call: Call) -> State:
    return taken_along(call, call.arg(1, "dim"), call.arg(2, "index"))


def narrow(call: Call) -> State:
    start, length = call.arg(2, "start"), call.arg(3, "length")
    check.not_a_value(call, start)
    at = norm(call.arg(1, "dim"), call.ndim(call.first))
    whole = start == 0 and call.number(length) == call.shape(call.first)[at]
    end = None if whole else start + length if isinstance(length, int) else length if start == 0 else Ellipsis
    if end is Ellipsis:
        raise Refused("picks rows by their place in the call")
    return taken_along(call, at, slice(start, end))


def index_select(call: Call) -> State:
    return taken_along(call, call.arg(1, "dim"), call.arg(2, "index"))


def taken_along(call: Call, dim: int, index: Any) -> State:
    items: list[Any] = [slice(None)] * call.ndim(call.first)
    items[norm(dim, len(items))] = index
    return indexed(call, call.first, tuple(items))[0]


def one_hot(call: Call) -> State:
    if not isinstance(call.arg(1, "num_classes", default=-1), int) or call.arg(1, "num_classes", default=-1) < 0:
        raise Refused("the number of classes is read from the data")
    return call.state(call.first)


def embedding(call: Call) -> State:
    """Rows of ids pick rows of a weight; the result has the dims of the ids and one more."""
    ids, weight = call.first, call.arg(1, "weight")
    check.not_a_root("a weight (max_norm)" if call.arg(3, "max_norm") is not None else "")
    check.no_row_gather(call, isinstance(call.state(weight), Rows))
    state = call.state(ids)
    return Rows(state.axis, state.inner, state.order) if isinstance(state, Rows) else state


def gather(call: Call) -> State:
    """gather, scatter: along a dim that is not the token dim, with rows that line up; or out of a uniform table."""
    source, dim, index = call.first, call.arg(1, "dim"), call.arg(2, "index")
    dim = norm(dim, call.ndim(index))
    states = call.state(source), call.state(index)
    if isinstance(states[1], Rows) and not isinstance(states[0], Rows):
        check.no_row_gather(call, states[1].axis != dim or call.name.startswith("scatter"))
        return Rows(states[1].axis, states[1].inner, states[1].order)
    state = align(call, [source, index, *[x for x in call.tensors() if x not in (source, index)]], call.ndim(index))
    if isinstance(state, Rows):
        check.no_row_gather(call, dim == state.axis or not isinstance(states[1], Rows))
    return state
