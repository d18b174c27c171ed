"""Read a call of torch's scaled dot product attention, and replace it by the attention op."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fullgraph_compile.ops import AttentionSite, attention
from fullgraph_compile.passes.common import expression, module_path, op_name, value_of
from fullgraph_compile.passes.masks import MaskKind
from fullgraph_compile.passes.part import NotUnderstood, remove_unread

SDPA = frozenset(
    {torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
)
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class SdpaCall:
    """An understood call.

    Attributes:
        q, k, v: ``[1, heads, T, size]`` or ``[heads, T, size]``; k and v before their heads were repeated.
        packed: whether the result has the batch dim of 1.
        keys_last: whether k is ``[..., heads, size, T]``.
    """

    node: Node
    q: Node
    k: Node
    v: Node
    packed: bool
    site: AttentionSite
    mask: MaskKind
    keys_last: bool = False


def geometry(shapes: Sequence[Any], token: Any, token_dim: int) -> dict[str, Any]:
    """Head counts and sizes from the shapes of q, k and v, each of three dims: ``token_dim``, the heads, the size.

    Raises:
        NotUnderstood: a dim that is not the token count, or a number, where one must be; heads that do not fit.
    """
    q, k, v = shapes
    for name, shape in zip(("queries", "keys", "values"), shapes, strict=True):
        if len(shape) != 3:
            raise NotUnderstood(f"the {name} of one row have {len(shape)} dims, not 3")
        if expression(shape[token_dim]) != token:
            raise NotUnderstood(f"there are {shape[token_dim]} {name}, not one for each of the {token} tokens")
        if not all(isinstance(expression(s), int) for d, s in enumerate(shape) if d != token_dim):
            raise NotUnderstood(f"the number or size of heads of the {name} is symbolic: {tuple(shape)}")
    heads, kv_heads, value_heads = (int(shape[1 - token_dim]) for shape in (q, k, v))
    if kv_heads != value_heads or heads % kv_heads or int(k[2]) != int(q[2]):
        raise NotUnderstood(f"the heads do not fit: queries {tuple(q)}, keys {tuple(k)}, values {tuple(v)}")
    return {"heads": heads, "kv_heads": kv_heads, "head_size": int(q[2]), "value_head_size": int(v[2])}


def read_sdpa(node: Node, index: int, token: Any, kind_of: Callable[[Node, Node], MaskKind]) -> SdpaCall:
    """All facts of a call.

    Args:
        index: of the site that the call becomes.
        kind_of: (mask, reader) -> what the mask computes; raises NotUnderstood.

    Raises:
        NotUnderstood: by the first fact that is not known.
    """
    if unknown := sorted(set(node.kwargs) - set(_ARGUMENTS)):
        raise NotUnderstood(f"its argument {unknown[0]} is not known")
    given: dict[str, Any] = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    if given.get("dropout_p", 0.0) != 0.0:
        raise NotUnderstood(f"dropout_p is {given['dropout_p']}, not 0")
    q, k, v = (given[name] for name in _ARGUMENTS[:3])
    dims = {value_of(n).dim() for n in (q, k, v)}
    if dims not in ({3}, {4}):
        raise NotUnderstood(f"queries, keys and values have {sorted(dims)} dims, not 4 or 3 each")
    packed = dims == {4}
    if packed and any(expression(value_of(n).shape[0]) != 1 for n in (q, k, v)):
        batches = ", ".join(str(value_of(n).shape[0]) for n in (q, k, v))
        raise NotUnderstood(f"the batch dim of queries, keys and values is {batches}, not 1 (all tokens in one row)")
    facts = geometry([value_of(n).shape[packed:] for n in (q, k, v)], token, token_dim=1)
    grouped = given.get("enable_gqa", False)
    # Without enable_gqa one key head is broadcast to all query heads, and any other count must be equal.
    if facts["kv_heads"] not in (1, facts["heads"]) and grouped is not True:
        raise NotUnderstood(f"{facts['heads']} query heads and {facts['kv_heads']} key heads with enable_gqa={grouped}")
    result = (*(1,) * packed, facts["heads"], token, facts["value_head_size"])
    if tuple(expression(s) for s in value_of(node).shape) != result:
        raise NotUnderstood(f"its result has shape {tuple(value_of(node).shape)}: the mask has dims of its own")
    scale = given.get("scale")
    scale = 1 / math.sqrt(facts["head_size"]) if scale is None else scale
    if not isinstance(scale, (int, float)):
        raise NotUnderstood("scale is not a constant of the trace")
    mask = _kind(node, given.get("attn_mask"), given.get("is_causal", False), kind_of)
    k, v, facts["kv_heads"] = _before_repeats(k, v, facts["kv_heads"], packed)
    site = AttentionSite(
        index, node.name, module_path(node), scale=float(scale), left=mask.left, right=mask.right,
        dtype=value_of(node).dtype, **facts,
    )  # fmt: skip
    return SdpaCall(node, q, k, v, packed, site, mask)


def _kind(node: Node, mask: Any, is_causal: Any, kind_of: Callable[[Node, Node], MaskKind]) -> MaskKind:
    if not isinstance(is_causal, bool):
        raise NotUnderstood("is_causal is not a constant of the trace")
    if mask is None:
        return MaskKind(-1, 0 if is_causal else -1, "one", None)
    if is_causal:
        raise NotUnderstood("it has a mask and is_causal")
    return kind_of(mask, node)


def _before_repeats(k: Node, v: Node, heads: int, packed: bool) -> tuple[Node, Node, int]:
    """Keys and values before each head was repeated for its group of query heads, if both were, equally."""
    bases = _before_repeat(k, packed), _before_repeat(v, packed)
    if bases[0] is None or bases[1] is None:
        return k, v, heads
    counts = {int(value_of(base).shape[packed]) for base in bases if base is not None}
    return (bases[0], bases[1], counts.pop()) if len(counts) == 1 else (k, v, heads)


def _before_repeat(node: Node, packed: bool) -> Node | None:
    """``k`` of ``k[:, :, None].expand(1, heads, n, T, size).reshape(1, heads * n, T, size)`` or repeat_interleave."""
    while op_name(node) == "contiguous":
        node = node.args[0]  # type: ignore[assignment]
    if op_name(node) == "repeat_interleave":
        given: dict[str, Any] = {**dict(zip(("input", "repeats", "dim"), node.args, strict=False)), **node.kwargs}
        known = isinstance(given.get("repeats"), int) and given.get("dim") in (int(packed), -3)
        return given.get("input", given.get("self")) if known else None
    expanded = node.args[0] if op_name(node) in ("reshape", "view") else None
    inserted = expanded.args[0] if isinstance(expanded, Node) and op_name(expanded) == "expand" else None
    base = inserted.args[0] if isinstance(inserted, Node) and inserted.args else None
    if not isinstance(expanded, Node) or not isinstance(inserted, Node) or not isinstance(base, Node):
        return None
    at = packed + 1
    if op_name(inserted) == "getitem":
        index = inserted.args[1]
        if not isinstance(index, tuple) or index[: at + 1] != (*(slice(None),) * at, None):
            return None
        if any(part not in (slice(None), Ellipsis) for part in index[at + 1 :]):
            return None
    elif op_name(inserted) != "unsqueeze" or inserted.args[1] not in (at, -3):
        return None
    *lead, heads, tokens, size = (expression(s) for s in value_of(base).shape)
    groups = [expression(s) for s in value_of(expanded).shape]
    merged = [expression(s) for s in value_of(node).shape]
    n = groups[at] if len(groups) == at + 3 else 0
    if len(lead) != packed or groups != [*lead, heads, n, tokens, size] or merged != [*lead, heads * n, tokens, size]:
        return None
    return base


def replace_sdpa(graph: Graph, call: SdpaCall, slopes: Node | None = None) -> None:
    """Replace the call by transposes to ``[T, heads, size]``, the op, and a transpose back; drop unread repeats.

    The op is given the dtype of the site.
    """
    old, site = call.node, call.site
    repeated = [n for n in old.all_input_nodes if n not in (call.q, call.k, call.v)]
    with graph.inserting_before(old):

        def rows(node: Node, last: bool = False) -> Node:
            if value_of(node).dim() == 4:
                node = emit(graph, old, operator.getitem, node, 0)
            node = emit(graph, old, "permute", node, 2, 0, 1) if last else emit(graph, old, "transpose", node, 0, 1)
            if value_of(node).dtype != site.dtype:
                # Torch takes one dtype, so autocast makes it that: of queries after a rotary in float32, for one.
                node = emit(graph, old, "to", node, site.dtype)
            # The op's layout is contiguous in the last dim.
            return node if expression(value_of(node).stride(-1)) == 1 else emit(graph, old, "contiguous", node)

        facts = (site.scale, site.left, site.right, site.softcap, site.index)
        out = emit(graph, old, attention, rows(call.q), rows(call.k, call.keys_last), rows(call.v), None, slopes,
                    *facts)  # fmt: skip
        if site.dtype != value_of(old).dtype:
            out = emit(graph, old, "to", out, value_of(old).dtype)
        out = emit(graph, old, "transpose", out, 0, 1)
        if call.packed:
            out = emit(graph, old, "unsqueeze", out, 0)
        # A view of the old result must still be one of the new; turning it back to rows first needs no copy.
        if _is_contiguous(old) and not all(_turns_to_rows(user, call.packed) for user in old.users):
            out = emit(graph, old, "contiguous", out)
    old.replace_all_uses_with(out)
    graph.erase_node(old)
    remove_unread(graph, _repeats(repeated))


def emit(graph: Graph, old: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node with the fake value, the source and the module of the one that it stands in for."""
    from torch._dispatch.python import enable_python_dispatcher

    node = graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args, kwargs)
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if key in old.meta:
            node.meta[key] = old.meta[key]
    first, *rest = map_arg(args, value_of)
    with value_of(old).fake_mode, enable_python_dispatcher():
        run = getattr(first, target) if isinstance(target, str) else target
        node.meta["example_value"] = run(*rest) if isinstance(target, str) else run(first, *rest, **kwargs)
    return node


def _is_contiguous(node: Node) -> bool:
    """By symbols alone: asking the fake tensor could add a guard."""
    value, expected = value_of(node), 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if expression(size) != 1 and expression(stride) != expected:
            return False
        expected = expected * expression(size)
    return True


def _turns_to_rows(user: Node, packed: bool) -> bool:
    if op_name(user) == "transpose":
        return set(user.args[1:]) in ({packed, packed + 1}, {-3, -2})
    if op_name(user) != "permute":
        return False
    order = user.args[1] if len(user.args) == 2 else user.args[1:]
    return order in ((0, 2, 1, 3), [0, 2, 1, 3]) if packed else order in ((1, 0, 2), [1, 0, 2])


def _repeats(nodes: list[Node]) -> list[Node]:
    """Of the given nodes and what they are views and copies of, those that nothing reads any more."""
    found: list[Node] = []
    pending = list(nodes)
    while pending:
        node = pending.pop()
        views = ("contiguous", "reshape", "view", "expand", "getitem", "unsqueeze", "repeat_interleave")
        if op_name(node) in views and isinstance(value_of(node), Tensor) and set(node.users) <= set(found):
            found.append(node)
            pending += node.all_input_nodes[:1]
    return found
