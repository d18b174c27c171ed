"""Recognise a bias of attention scores that is a slope of each head times the distance of key and query: ALiBi.

Softmax takes no notice of what is the same for all keys of a query, so the bias may count from anywhere.  As a mask,
it is known by what it computes: its part of the graph is run at several sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from fullgraph_compile.passes.common import expression, value_of
from fullgraph_compile.passes.part import NotUnderstood, Part
from fullgraph_compile.passes.probe import Probe, concrete, on_cpu

_SIZES = (1, 2, 3, 7, 33, 70, 1031)
# Where it is one row for all queries, and where it is T x T.
_LARGE, _MOST_IN_FULL = 2**16 + 7, 6000
# Values may have been rounded to their dtype once at each step.
_ROUNDINGS = 4


def recognise_slopes(bias: Node, part: Part, token: Any, heads: int) -> tuple[float, ...]:
    """The slope of each head.

    Args:
        bias: a float tensor that is added to the scores, ``[heads, 1 or T, T]``, with dims of 1 before it or without.
        part: what decides its value; it may depend on the token count alone.
        token: the symbol of the token count.

    Raises:
        NotUnderstood: the bias is something else.
    """
    value = value_of(bias)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        raise NotUnderstood("the bias is not a float tensor of two dims or more")
    if part.inputs:
        raise NotUnderstood(f"the bias is computed from {part.inputs[0].name}")
    *lead, rows = (expression(s) for s in value.shape[:-1])
    if rows not in (1, token) or any(n not in (1, heads) for n in lead) or lead.count(heads) > 1:
        raise NotUnderstood(f"the bias has shape {tuple(value.shape)}")
    sizes = [*_SIZES, _LARGE] if rows == 1 else [*_SIZES, *_beyond_constants(part)]
    if getattr(token, "is_Integer", False):
        sizes = [int(token)]
    # A bias that is cut from a table ends with the table, and with it the calls that the model can make.
    fits = [n for n in sizes if concrete(value.shape[-1], token, n) == n]
    if fits != sizes[: len(fits)] or len(fits) < min(len(sizes), 5):
        raise NotUnderstood(f"the bias has shape {tuple(value.shape)}")
    sizes = fits
    with on_cpu():
        try:
            found = [_slopes(Probe(part, token, n, {}).run(bias), heads, value.dtype) for n in sizes]
        except NotUnderstood:
            raise
        except Exception as error:
            raise NotUnderstood(f"the bias cannot be run by itself ({type(error).__name__}: {error})") from error
    # Most rows tell the slope best where values are rounded.
    slopes = found[-1]
    for n, other in zip(sizes, found, strict=True):
        apart = (other - slopes).abs() * (n - 1)
        if bool((apart > _rounding(value.dtype) * slopes.abs() * n).any()):
            raise NotUnderstood(f"the bias has other slopes for {n} tokens than for {sizes[-1]}")
    return tuple(slopes.tolist())


def _slopes(value: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """``[heads]`` in float64.

    Raises:
        NotUnderstood: a row of the bias is no straight line.
    """
    value = value.double()
    tokens = value.shape[-1]
    value = value.reshape(-1, value.shape[-2], tokens)
    value = (value - value[..., :1]).expand(heads, -1, -1)
    distance = torch.arange(tokens, dtype=torch.float64)
    slopes = (value[:, 0] @ distance) / distance.square().sum().clamp_min(1.0)
    line = slopes[:, None, None] * distance
    # The first key's value was taken off, so rounding is that of the largest value, not of each.
    allowed = _rounding(dtype) * value.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    if not bool(((value - line).abs() <= allowed).all()):
        raise NotUnderstood("the bias is no slope times a distance")
    return slopes


def _rounding(dtype: torch.dtype) -> float:
    return _ROUNDINGS * torch.finfo(dtype).eps


def _beyond_constants(part: Part) -> list[int]:
    """A size beyond every number of the part that may be a distance."""
    found: list[int] = [0]

    def note(value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 < abs(value) < 2**20:
            found.append(int(abs(value)))
        return value

    for node in part.nodes:
        map_aggregate((node.args, dict(node.kwargs)), note)
    most = max(found) + 33
    if most > _MOST_IN_FULL:
        raise NotUnderstood(f"the bias is too large to be looked at beyond its constant of {max(found)}")
    return [most]
