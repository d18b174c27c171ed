"""Read attention that a model writes out: a product of queries and keys, a softmax, a product with the values.

Between the first product and the softmax, scores may be scaled by constants, capped, cast, viewed, masked and biased.
What is added to them or chosen by is recognised by what it computes; anything else leaves the attention as it is, for a
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.passes.common import expression, module_path, op_name, value_of
from fullgraph_compile.passes.masks import MaskKind
from fullgraph_compile.passes.part import METADATA_ONLY, NotUnderstood
from fullgraph_compile.passes.scores import CASTS, VIEWS, check_uncapped, product_before, scores_before, square
from fullgraph_compile.passes.sdpa import SdpaCall, geometry

KindOf = Callable[[Node, Node, bool, float], MaskKind]
"""(mask, reader, whether True hides, factor after it is added) -> what the mask computes; raises NotUnderstood."""
SlopesOf = Callable[[Node, Node, int], tuple[float, ...]]
"""(bias, reader, heads) -> slopes; raises NotUnderstood."""


def is_attention(softmax: Node, token: Any) -> bool:
    """Whether a softmax is over keys of a product of queries and keys, and weighs values."""
    return (
        op_name(softmax) == "softmax"
        and bool(softmax.args)
        and square(softmax, token)
        and product_before(softmax.args[0], token)
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
    scores = scores_before(softmax, token)
    end = _after(softmax, token)
    assert end is not None
    q, keys, bias, beta, alpha = _product(scores.product)
    v: Any = end.args[1] if len(end.args) > 1 else end.kwargs.get("other", end.kwargs.get("mat2"))
    if not all(isinstance(n, Node) and isinstance(value_of(n), Tensor) for n in (q, keys, v)):
        raise NotUnderstood("queries, keys and values are not three tensors")
    if bias is not None:
        check_uncapped(scores.product, scores)
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

    dtype = value_of(end).dtype
    k = _transposed(keys)
    reads = q, keys if k is None else k
    # Under autocast products are of its dtype, whatever their operands are, so the two may be of different ones.
    if (computed := value_of(scores.product).dtype) != dtype:
        if value_of(v).dtype == computed:
            dtype = computed
        else:
            reads = _uncast(reads[0], dtype), _uncast(reads[1], dtype)
    site = AttentionSite(
        index, softmax.name, module_path(softmax), scale=scores.factor * alpha, left=mask.left, right=mask.right,
        softcap=scores.softcap, slopes=slopes is not None, dtype=dtype, **facts,
    )  # fmt: skip
    call = SdpaCall(end, *reads, v, packed, site, mask, keys_last=k is None)
    return call, None if slopes is None else tuple(slopes)


def scores_of(end: Node, token: Any) -> set[Node]:
    """What only makes the weights that ``end`` multiplies with the values: nothing else may need it any more."""
    found: set[Node] = set()
    pending = [end.args[0]]
    while pending:
        node = pending.pop()
        if isinstance(node, Node) and node not in found and square(node, token):
            found.add(node)
            pending += node.all_input_nodes
    return found


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
        if not (name in CASTS or name in VIEWS or inert) or not square(node, token):
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
