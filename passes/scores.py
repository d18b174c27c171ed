"""Attention scores on their way from the product of queries and keys to the softmax: what is done to them, in order.

They may be scaled by constants, capped, cast, viewed, masked and biased; anything else is refused, for a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from fullgraph_compile.passes.common import expression, free_symbols, op_name, value_of
from fullgraph_compile.passes.masks import HIDDEN
from fullgraph_compile.passes.part import METADATA_ONLY, NotUnderstood

_PRODUCTS = ("matmul", "bmm", "baddbmm")
CASTS = ("to", "float", "type", "type_as", "contiguous", "clone")
VIEWS = ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten")


@dataclass
class Scores:
    """What happens to the scores from their product on.

    Attributes:
        factor: what the product is multiplied with in all.
        added: what is added to them, the node that reads it, and what it is multiplied with afterwards.
        hidden: masks that choose between scores and a constant, their readers, and whether True hides.
        softcap: what a tanh of them is multiplied with; 0.0 = there is none.
    """

    product: Node
    factor: float = 1.0
    added: list[tuple[Node, Node, float]] = field(default_factory=list)
    hidden: list[tuple[Node, Node, bool]] = field(default_factory=list)
    softcap: float = 0.0


def scores_before(softmax: Node, token: Any) -> Scores:
    """From the softmax back to the product of queries and keys.

    Raises:
        NotUnderstood: by the first thing done to the scores that is not known.
    """
    scores = Scores(softmax)
    node, reader = softmax.args[0], softmax
    while True:
        if not isinstance(node, Node) or not square(node, token):
            raise NotUnderstood("the scores are not one number for each pair of tokens")
        if not value_of(node).is_floating_point():
            raise NotUnderstood(f"the scores are made {value_of(node).dtype}")
        if any(user is not reader and op_name(user) not in METADATA_ONLY for user in node.users):
            raise NotUnderstood(f"the scores {node.name} are read by something else")
        if op_name(node) in _PRODUCTS and not any(square(n, token) for n in node.all_input_nodes[-2:]):
            scores.product = node
            return scores
        node, reader = _step(node, scores, token), node


def _step(node: Node, scores: Scores, token: Any) -> Any:
    """The scores before ``node``; what it does to them is noted."""
    name, args = op_name(node), node.args
    first, second = (*args, None, None)[:2]
    if name in CASTS or name in VIEWS:
        return first
    if name in ("mul", "multiply") and isinstance(first, (int, float)):
        first, second = second, first
    if name in ("mul", "multiply") and isinstance(second, (int, float)):
        scores.factor *= second
        return first
    if name in ("truediv", "div") and isinstance(second, (int, float)) and not node.kwargs:
        scores.factor /= second
        return first
    if name == "tanh" and not scores.softcap and scores.factor > 0:
        # What it is multiplied with is the cap; the product before it is divided by that.
        scores.softcap = scores.factor
        return first
    if name in ("add", "masked_fill", "where"):
        check_uncapped(node, scores)
    if name == "add" and isinstance(first, Node) and isinstance(second, Node) and not node.kwargs:
        if product_before(second, token):
            first, second = second, first
        if product_before(second, token):
            raise NotUnderstood("what is added to the scores depends on queries or keys, too")
        scores.added.append((second, node, scores.factor))
        return first
    if name == "masked_fill":
        _check_hidden(args[2] if len(args) > 2 else node.kwargs.get("value"), scores)
        scores.hidden.append((second, node, True))  # type: ignore[arg-type]
        return first
    if name == "where" and len(args) == 3:
        hides = not product_before(args[1], token)
        kept, constant = (args[2], args[1]) if hides else (args[1], args[2])
        _check_hidden(constant, scores)
        scores.hidden.append((first, node, hides))  # type: ignore[arg-type]
        return kept
    floors = name in ("max", "maximum", "clamp", "clamp_min") and len(args) == 2 and not node.kwargs
    if floors and _constant(second) <= -1e30:
        return first
    raise NotUnderstood(f"{name} is done to the scores")


def check_uncapped(node: Node, scores: Scores) -> None:
    """Nothing may be added to scores, or hidden in them, before their soft cap: the op does both after it."""
    if scores.softcap:
        raise NotUnderstood(f"{op_name(node)} is done to the scores before their soft cap")


def _check_hidden(constant: Any, scores: Scores) -> None:
    if not _constant(constant) * scores.factor <= HIDDEN or scores.factor <= 0:
        raise NotUnderstood("hidden scores are not set to a very negative constant")


def _constant(value: Any) -> float:
    """A number, or a 0-d tensor that is made of one; NaN for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and op_name(value) in ("tensor", "full") and value_of(value).dim() == 0:
        number = value.args[1 if op_name(value) == "full" else 0] if value.args else None
        return _constant(number) if not isinstance(number, Node) else float("nan")
    if isinstance(value, Node) and op_name(value) in ("to", "float"):
        return _constant(value.args[0])
    return float("nan")


def square(node: Any, token: Any) -> bool:
    """Whether a node holds a number for each pair of tokens: its last two dims are the token count."""
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dim() >= 2 and all(_is_token(s, token) for s in value.shape[-2:])


def _is_token(size: Any, token: Any) -> bool:
    """Whether a size is the token count, in whatever words: a view may call it ``T * T // T``."""
    expr = expression(size)
    if expr == token:
        return True
    return free_symbols(size) == {token} and all(expr.subs(token, n) == n for n in (1, 2, 3, 7, 64, 1031, 65537))


def product_before(node: Any, token: Any) -> bool:
    """Whether a node depends on a product of queries and keys through nothing but T x T tensors."""
    pending, seen = [node], set()
    while pending:
        at = pending.pop()
        if not isinstance(at, Node) or at in seen or not square(at, token):
            continue
        seen.add(at)
        if op_name(at) in _PRODUCTS and not any(square(n, token) for n in at.all_input_nodes[-2:]):
            return True
        pending += at.all_input_nodes
    return False
