"""Read attention that a model writes out: a product of queries and keys, a softmax, a product with the values.

Between the first product and the softmax, scores may be scaled by constants, capped, cast, viewed, masked and biased.
What is added to them or chosen by is recognised by what it computes; anything else leaves the attention as it is, for a
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.passes.common import expression, free_symbols, module_path, op_name, value_of
from fullgraph_compile.passes.masks import HIDDEN, MaskKind
from fullgraph_compile.passes.part import METADATA_ONLY, NotUnderstood
from fullgraph_compile.passes.sdpa import SdpaCall, geometry

_PRODUCTS = ("matmul", "bmm", "baddbmm")
_CASTS = ("to", "float", "type", "type_as", "contiguous", "clone")
_VIEWS = ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten")

KindOf = Callable[[Node, Node, bool, float], MaskKind]
"""(mask, reader, whether True hides, factor after it is added) -> what the mask computes; raises NotUnderstood."""
SlopesOf = Callable[[Node, Node, int], tuple[float, ...]]
"""(bias, reader, heads) -> slopes; raises NotUnderstood."""


@dataclass
class _Scores:
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


def is_attention(softmax: Node, token: Any) -> bool:
    """Whether a softmax is over keys of a product of queries and keys, and weighs values."""
    return (
        op_name(softmax) == "softmax"
        and bool(softmax.args)
        and _square(softmax, token)
        and _product_before(softmax.args[0], token)
        and _after(softmax, token) is not None
    )


def read_written_out(
    softmax: Node, index: int, token: Any, kind_of: KindOf, slopes_of: SlopesOf
) -> tuple[SdpaCall, tuple[float, ...] | None]:
    """All facts of an attention of which ``softmax`` is the middle, and its ALiBi slopes.

    Args:
        index: of the site that it becomes.

    Raises:
        NotUnderstood: by the first fact that is not known.
    """
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if dim not in (-1, value_of(softmax).dim() - 1):
        raise NotUnderstood(f"the softmax is over dim {dim}, not over the keys")
    scores = _before(softmax, token)
    end = _after(softmax, token)
    assert end is not None
    q, keys, bias, beta, alpha = _product(scores.product)
    v: Any = end.args[1] if len(end.args) > 1 else end.kwargs.get("other", end.kwargs.get("mat2"))
    if not all(isinstance(n, Node) and isinstance(value_of(n), Tensor) for n in (q, keys, v)):
        raise NotUnderstood("queries, keys and values are not three tensors")
    if bias is not None:
        _check_uncapped(scores.product, scores)
        scores.added.append((bias, scores.product, scores.factor * beta))

    shapes = [_of_one_row(n) for n in (q, keys, v)]
    shapes[1] = (shapes[1][0], shapes[1][2], shapes[1][1])
    facts = geometry(shapes, token, token_dim=1)
    if facts["kv_heads"] not in (1, facts["heads"]):
        raise NotUnderstood(f"{facts['heads']} query heads and {facts['kv_heads']} key heads")
    packed = value_of(end).dim() == 4
    result = (*(1,) * packed, facts["heads"], token, facts["value_head_size"])
    if tuple(expression(s) for s in value_of(end).shape) != result:
        raise NotUnderstood(f"its result has shape {tuple(value_of(end).shape)}")

    mask, slopes = MaskKind(-1, -1, "one", None), None
    for chooser, reader, hides in scores.hidden:
        mask = _both(mask, kind_of(chooser, reader, hides, 1.0))
    for side, reader, factor in scores.added:
        try:
            kind = kind_of(side, reader, False, factor)
        except NotUnderstood as no_mask:
            try:
                found = slopes_of(side, reader, facts["heads"])
            except NotUnderstood as no_slopes:
                raise NotUnderstood(f"{no_mask}; {no_slopes}") from None
            slopes = [s + factor * f for s, f in zip(slopes or [0.0] * len(found), found, strict=True)]
            continue
        mask = _both(mask, kind)

    dtype = value_of(v).dtype
    site = AttentionSite(
        index, softmax.name, module_path(softmax), scale=scores.factor * alpha, left=mask.left, right=mask.right,
        softcap=scores.softcap, slopes=slopes is not None, dtype=dtype, **facts,
    )  # fmt: skip
    k = _transposed(keys)
    call = SdpaCall(
        end, _uncast(q, dtype), _uncast(keys if k is None else k, dtype), v, packed, site, mask, keys_last=k is None
    )
    return call, None if slopes is None else tuple(slopes)


def scores_of(end: Node, token: Any) -> set[Node]:
    """What only makes the weights that ``end`` multiplies with the values: nothing else may need it any more."""
    found: set[Node] = set()
    pending = [end.args[0]]
    while pending:
        node = pending.pop()
        if isinstance(node, Node) and node not in found and _square(node, token):
            found.add(node)
            pending += node.all_input_nodes
    return found


def _before(softmax: Node, token: Any) -> _Scores:
    """From the softmax back to the product of queries and keys."""
    scores = _Scores(softmax)
    node, reader = softmax.args[0], softmax
    while True:
        if not isinstance(node, Node) or not _square(node, token):
            raise NotUnderstood("the scores are not one number for each pair of tokens")
        if not value_of(node).is_floating_point():
            raise NotUnderstood(f"the scores are made {value_of(node).dtype}")
        if any(user is not reader and op_name(user) not in METADATA_ONLY for user in node.users):
            raise NotUnderstood(f"the scores {node.name} are read by something else")
        if op_name(node) in _PRODUCTS and not any(_square(n, token) for n in node.all_input_nodes[-2:]):
            scores.product = node
            return scores
        node, reader = _step(node, scores, token), node


def _step(node: Node, scores: _Scores, token: Any) -> Any:
    """The scores before ``node``; what it does to them is noted."""
    name, args = op_name(node), node.args
    first, second = (*args, None, None)[:2]
    if name in _CASTS or name in _VIEWS:
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
        _check_uncapped(node, scores)
    if name == "add" and isinstance(first, Node) and isinstance(second, Node) and not node.kwargs:
        if _product_before(second, token):
            first, second = second, first
        if _product_before(second, token):
            raise NotUnderstood("what is added to the scores depends on queries or keys, too")
        scores.added.append((second, node, scores.factor))
        return first
    if name == "masked_fill":
        _check_hidden(args[2] if len(args) > 2 else node.kwargs.get("value"), scores)
        scores.hidden.append((second, node, True))  # type: ignore[arg-type]
        return first
    if name == "where" and len(args) == 3:
        hides = not _product_before(args[1], token)
        kept, constant = (args[2], args[1]) if hides else (args[1], args[2])
        _check_hidden(constant, scores)
        scores.hidden.append((first, node, hides))  # type: ignore[arg-type]
        return kept
    floors = name in ("max", "maximum", "clamp", "clamp_min") and len(args) == 2 and not node.kwargs
    if floors and _constant(second) <= -1e30:
        return first
    raise NotUnderstood(f"{name} is done to the scores")


def _check_uncapped(node: Node, scores: _Scores) -> None:
    if scores.softcap:
        raise NotUnderstood(f"{op_name(node)} is done to the scores before their soft cap")


def _check_hidden(constant: Any, scores: _Scores) -> None:
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


def _after(softmax: Node, token: Any) -> Node | None:
    """From the softmax on to the product with the values; None if something else becomes of the weights."""
    node = softmax
    while True:
        users = [u for u in node.users if op_name(u) not in METADATA_ONLY]
        if len(users) != 1 or not users[0].args or users[0].args[0] is not node:
            return None
        node = users[0]
        name = op_name(node)
        if name in ("matmul", "bmm"):
            return node
        inert = name == "dropout" and (_argument(node, 1, "p") == 0 or _argument(node, 2, "training") is False)
        if not (name in _CASTS or name in _VIEWS or inert) or not _square(node, token):
            return None


def _argument(node: Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _product(node: Node) -> tuple[Any, Any, Any, float, float]:
    """Queries, keys ``[..., size, T]``, what is added, what it is multiplied with, and what the product is."""
    if op_name(node) != "baddbmm":
        given = [*node.args, *node.kwargs.values()]
        if len(given) != 2:
            raise NotUnderstood(f"the product has {len(given)} arguments")
        return given[0], given[1], None, 1.0, 1.0
    names = ("input", "batch1", "batch2")
    found: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    beta, alpha = found.get("beta", 1), found.get("alpha", 1)
    if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
        raise NotUnderstood("the product's factors are not constants")
    return found["batch1"], found["batch2"], found["input"], float(beta), float(alpha)


def _both(a: MaskKind, b: MaskKind) -> MaskKind:
    """What passes both masks."""
    left, right = (min(x, y) if min(x, y) >= 0 else max(x, y) for x, y in ((a.left, b.left), (a.right, b.right)))
    if a.positions and b.positions and a.positions != b.positions:
        raise NotUnderstood(f"requests are told apart by {a.positions} and by {b.positions}")
    told = a if a.positions else b
    return replace(told, left=left, right=right)


def _of_one_row(node: Node) -> tuple[Any, ...]:
    """The last three sizes; a batch dim before them must be 1."""
    shape = tuple(value_of(node).shape)
    if len(shape) not in (3, 4) or (len(shape) == 4 and expression(shape[0]) != 1):
        raise NotUnderstood(f"{node.name} has shape {shape}, not one row of tokens")
    return shape[-3:]


def _transposed(node: Node) -> Node | None:
    """``k`` of ``k.transpose(-1, -2)``."""
    if op_name(node) != "transpose" or len(node.args) != 3:
        return None
    last = value_of(node).dim()
    return node.args[0] if {d % last for d in node.args[1:]} == {last - 2, last - 1} else None  # type: ignore


def _uncast(node: Node, dtype: Any) -> Node:
    """A node before it was cast from ``dtype``; the op takes one dtype, and computes in float32."""
    if value_of(node).dtype == dtype:
        return node
    source = node.args[0] if op_name(node) in ("to", "float", "type") and node.args else None
    if isinstance(source, Node) and value_of(source).dtype == dtype:
        return source
    raise NotUnderstood(f"queries or keys are {value_of(node).dtype}, values {dtype}")


def _square(node: Any, token: Any) -> bool:
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dim() >= 2 and all(_is_token(s, token) for s in value.shape[-2:])


def _is_token(size: Any, token: Any) -> bool:
    """Whether a size is the token count, in whatever words: a view may call it ``T * T // T``."""
    expr = expression(size)
    if expr == token:
        return True
    return free_symbols(size) == {token} and all(expr.subs(token, n) == n for n in (1, 2, 3, 7, 64, 1031, 65537))


def _product_before(node: Any, token: Any) -> bool:
    """Whether a node depends on a product of queries and keys through nothing but T x T tensors."""
    pending, seen = [node], set()
    while pending:
        at = pending.pop()
        if not isinstance(at, Node) or at in seen or not _square(at, token):
            continue
        seen.add(at)
        if op_name(at) in _PRODUCTS and not any(_square(n, token) for n in at.all_input_nodes[-2:]):
            return True
        pending += at.all_input_nodes
    return False
