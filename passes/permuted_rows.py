"""Rules of the padding proof for mixtures of experts, which sort all rows by expert and put them back.

    ids                 [tokens * k]      expert ids, rows
    keys, perm = sort(ids)                keys: rows in the sort's order;  perm: sorted place -> row
    x[perm // k]                          rows in the sort's order
    cumsum(histc(keys, bins = experts))   borders of the groups; legal only as the offsets of a grouped product
    inverse[perm] = arange(tokens * k)    row -> sorted place
    y[inverse]                            rows in token order again

Where a row lands depends on every other row, what it holds does not: so the sort's order is part of the state
(``Rows.order``), rows in two orders never meet, and rows that leave the graph must be in token order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import row_checks as check
from .common import value_of
from .row_functions import along, elementwise
from .row_state import UNIFORM, Call, Counts, Inverse, Many, Offsets, Perm, Positions, Refused, Rows, State

_INTS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def sort(call: Call) -> State:
    """sort, argsort: along a feature dim; or of one expert id a row, which begins a permuted order."""
    raw = call.raw(call.first)
    if isinstance(raw, Perm) and call.name == "argsort" and raw.divisor == 1:
        return Inverse(raw.order, raw.inner)
    state = call.state(call.first)
    ids = value_of(call.first)
    starts = (
        isinstance(state, Rows)
        and state.order is None
        and isinstance(ids, Tensor)
        and ids.ndim == 1
        and ids.dtype in _INTS
    )
    if not starts or not isinstance(state, Rows):
        return along(1, default=-1)(call)
    perm = Perm(call.node, state.inner)
    ascending = not call.arg(2, "descending", default=False)
    keys = Rows(0, state.inner, call.node, keys=ascending)
    return perm if call.name == "argsort" else Many((keys, perm))


def floor_divide(call: Call) -> State:
    """``perm // k``: the token of each sorted row."""
    state, k = call.raw(call.first), call.arg(1, "other")
    rounded = call.name in ("floordiv", "floor_divide") or call.arg(2, "rounding_mode") == "floor"
    if isinstance(state, Perm) and isinstance(k, int) and k > 0 and rounded and state.inner % (state.divisor * k) == 0:
        return Perm(state.order, state.inner, state.divisor * k)
    return elementwise(call)


def takes_permuted(call: Call, source: Any, index: Any, dim: int) -> State | None:
    """``x[perm // k]`` and ``y[inverse]``; None for any other index."""
    by = call.raw(index)
    if not isinstance(by, (Perm, Inverse)):
        return None
    state = call.state(source)
    if not isinstance(state, Rows) or state.axis != dim:
        raise Refused("a sorting index is used on a tensor without those rows")
    if isinstance(by, Perm) and state.order is None and state.inner * by.divisor == by.inner:
        return Rows(dim, by.inner, by.order, keys=False)
    if isinstance(by, Inverse) and state.order is by.order and state.inner == by.inner:
        return Rows(dim, by.inner)
    raise Refused("a sorting index is used on rows in another order")


def inverted(call: Call, source: Any, index: Any, value: Any) -> State | None:
    """``inverse[perm] = arange(n)``; None for any other assignment."""
    by = call.raw(index[0] if isinstance(index, (tuple, list)) and len(index) == 1 else index)
    if not isinstance(by, Perm):
        return None
    if by.divisor != 1:
        raise Refused("writes rows by an index that names a row several times")
    numbers = call.raw(value)
    full = call.ndim(source) == 1 and call.raw(source) == Rows(0, by.inner) and value_of(source).dtype in _INTS[:2]
    if full and isinstance(numbers, Positions) and numbers.inner == by.inner:
        return Inverse(by.order, by.inner)
    return None


def histc(call: Call) -> State:
    state = call.raw(call.first)
    if not isinstance(state, Rows):
        return along(9)(call)
    bins, low, high = call.arg(1, "bins", default=100), call.arg(2, "min", default=0), call.arg(3, "max", default=0)
    check.counts_experts(call, state.keys and low == 0 and high == bins - 1)
    return Counts(state.order or call.node, bins)


def cumsum(call: Call) -> State:
    state = call.raw(call.first)
    return Offsets(state.order, state.bins) if isinstance(state, Counts) else along(1)(call)


def grouped_mm(call: Call) -> State:
    """Row i times the weight of the group that i falls into; the groups must be those of the rows' own sort."""
    weight, borders = call.arg(1, "weight", "mat_b", "mat2"), call.raw(call.arg(2, "offs"))
    state = call.state(call.first)
    if not isinstance(state, Rows) or state.axis != 0 or call.ndim() != 2 or call.state(weight) != UNIFORM:
        raise Refused("a grouped product is understood only for rows and expert weights")
    bias = call.arg(3, "bias")
    if bias is not None and call.state(bias) != UNIFORM:
        raise Refused("its bias depends on rows")
    own = isinstance(borders, Offsets) and borders.order is state.order and borders.bins == call.shape(weight)[0]
    check.counts_experts(call, own)
    return Rows(0, state.inner, state.order)
