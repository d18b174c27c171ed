"""The reasons to refuse, one a function: each raises ``Refused``.

Rules call them as ``check.<name>``, so that a test can turn one off and see a fault go through.
"""

from __future__ import annotations

import sys
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from .common import value_of
from .row_state import Call, Refused, Rows


def one_token_dim(call: Call, shape: tuple[Any, ...]) -> None:
    """Two token dims pair every row with every other one."""
    if sum(call.has_token(s) for s in shape) > 1:
        raise Refused("makes a tensor with two token dims: every row meets every other row")


def followed(call: Call, found: bool) -> None:
    """The result must have its token dim where the rule put it: a net under the rules."""
    if not found:
        raise Refused("the token dim cannot be followed through it")


def not_a_value(call: Call, *values: Any) -> None:
    if any(call.mentions(v) for v in values):
        raise Refused("uses the token count as a value: padding changes it")


def not_along(call: Call, axis: int, dims: tuple[int, ...]) -> None:
    if axis in dims:
        raise Refused(f"{call.name} over the token dim mixes rows")


def same_product(call: Call, before: Any, after: Any) -> None:
    """A view keeps each row's elements together only if as many elements precede the first row as before."""
    if before != after and sympy.simplify(before - after) != 0:
        raise Refused(f"the sizes before the token dim change from {before} to {after}: elements move between rows")


def lines_up(call: Call, places: set[tuple[int, int]]) -> None:
    if len(places) > 1:
        raise Refused("its operands have the token dim in different places: rows meet other rows")


def same_order(call: Call, rows: list[Rows]) -> None:
    if len({r.order for r in rows}) > 1:
        raise Refused("pairs rows in the order of a sort with rows in another order")


def not_contracted(call: Call, contracted: bool) -> None:
    if contracted:
        raise Refused("a product sums over the token dim")


def whole(call: Call, index: Any, size: Any) -> None:
    """Only a slice that takes all rows, in order, keeps them."""
    if isinstance(index, slice) and index.step in (None, 1):
        start, stop = call.number(index.start), call.number(index.stop)
        if start in (None, 0) and (stop is None or stop == size or stop == sys.maxsize):
            return
    raise Refused("picks rows by their place in the call: padding moves the last rows, and a row is not a request")


def no_mask(call: Call, index: Any) -> None:
    if isinstance(index, Node) and getattr(value_of(index), "dtype", None) in (torch.bool, torch.uint8):
        raise Refused("indexing with a boolean mask: the result's size depends on the data")


def no_row_gather(call: Call, gathers: bool) -> None:
    if gathers:
        raise Refused("gathers or writes rows by an index: a row may get any other row")


def same_device(call: Call) -> None:
    here, there = value_of(call.first), call.value
    if isinstance(here, Tensor) and isinstance(there, Tensor) and here.device.type != there.device.type:
        raise Refused(f"moves a tensor from {here.device.type} to {there.device.type}: a host read or write per call")


def not_random(call: Call, random: bool) -> None:
    if random:
        raise Refused("dropout in train mode is random")


def looks_back(call: Call, lag: int) -> None:
    if lag < 0:
        raise Refused("a row sees later rows, which may be padding")


def counts_experts(call: Call, exact: bool) -> None:
    """Counts of the sort's own keys, one bin a key, are the borders of the sorted groups; others are not."""
    if not exact:
        raise Refused("counts rows: the result depends on every row")


def not_a_root(kind: str) -> None:
    if kind:
        raise Refused(f"mutates {kind}")


def not_shared(shared: bool) -> None:
    if shared:
        raise Refused("changes in place what a sorting index or expert counts are read from")
