"""Whether requests of one packed call could see each other in what a graph computes besides attention.

A row that the model *picks* by its place is still a row of one request: ``hidden[:, -1:]``, a head on chosen rows.
What puts several rows together, or numbers or counts them, is not.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from . import row_functions as other
from . import row_indexing, row_products
from .check_row_independence import Proof
from .common import Refusal, is_size, output_node, refusal, token_dims, value_of
from .row_functions import cast, elementwise
from .row_memory import canonical
from .row_rules import TABLE

_PICKS = frozenset({"getitem", "select", "index_select", "narrow"})
# Each element, or each vector along the last dim, by itself.
_APART = (elementwise, cast, row_products.linear, other.trailing, other.dropout)
_ATTENTION = frozenset({"full_prefill::attention", "full_prefill::hosted_attention", "scaled_dot_product_attention"})


def requests_meet(gm: GraphModule, proof: Proof, inside: Container[str]) -> tuple[Refusal, ...]:
    """What of a traced graph is only right where all of its rows are one request's.

    Args:
        gm: the graph that the proof is of.
        inside: names of its nodes that do not matter: the body, where the tail is asked about.
    """
    found = [r for r in proof.single_request if r.node not in inside]
    roots = {r.node: r for r in proof.refusals}
    picked: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node.name in inside or node.name not in proof.tainted or not node.op.startswith("call"):
            continue
        why = _picks(node, proof) if node.name in roots else _joins(node, proof, picked)
        if why:
            found.append(roots.get(node.name) or refusal(node, why))
        else:
            picked[node] = picked[next(n for n in node.all_input_nodes if n in picked)] if _from(node, picked) else node
    return tuple(found)


def _from(node: Node, picked: dict[Node, Node]) -> bool:
    return any(n in picked for n in node.all_input_nodes)


def _picks(node: Node, proof: Proof) -> str:
    """Why a refused op is more than rows picked by an index that no row says; empty if it is no more."""
    if not node.all_input_nodes:
        return "is no choice of rows"  # random numbers, say
    name, writes = canonical(node)
    source, *index = node.all_input_nodes
    dims = token_dims(value_of(source), proof.token)
    rows = source.name in proof.rows and len(dims) == 1 and dims[0] != value_of(source).dim() - 1
    told = any(n.name in proof.rows or n.name in proof.tainted or _is_mask(n) for n in index)
    return "" if name in _PICKS and rows and not told and not writes else "is no choice of rows"


def _is_mask(node: Node) -> bool:
    return getattr(value_of(node), "dtype", None) in (torch.bool, torch.uint8)


def _joins(node: Node, proof: Proof, picked: dict[Node, Node]) -> str:
    """Why what is computed of picked rows may be of several of them; empty if each is by itself."""
    tensors = [n for n in node.all_input_nodes if isinstance(value_of(n), Tensor)]
    if not any(isinstance(value_of(n), Tensor) for n in (node, *node.all_input_nodes)):
        return ""  # about sizes
    name, writes = canonical(node)
    entry = TABLE.get(name)
    ours = [n for n in tensors if n in picked]
    alike = {(picked[n], tuple(value_of(n).shape)) for n in ours}
    others = [n for n in tensors if n not in picked and n.name not in proof.uniform]
    last = name in ("softmax", "log_softmax") and _dims(node) in ((-1,), (value_of(node).dim() - 1,))
    apart = last or (entry is not None and entry.rule in _APART)
    first = not ours or node.all_input_nodes[0] is ours[0] or (entry is not None and entry.rule is elementwise)
    if ours and not others and len(alike) == 1 and apart and first and not writes:
        return ""
    return "puts rows together that were picked, or them and others"


def might_meet(gm: GraphModule, tokens: int) -> str:
    """The same of a graph that was traced for a fixed token count, by its shapes: why not to trust it, or empty.

    There a dim of that size is taken for the token dim, of two the first; what is not known is not trusted.
    """
    picked: set[Node] = set()
    for node in rows_made_of(gm, tokens):
        why = _static(node, tokens, picked)
        if why:
            return str(refusal(node, why))
    return ""


def rows_made_of(gm: GraphModule, token: Any) -> list[Node]:
    """Calls that a result depends on which may be rows, in order.

    Masks and positions, which Dynamo hands from one of its graphs to the next, are none: they say who is who.
    """
    seen: set[Node] = set()
    stack = []
    for leaf in output_node(gm).all_input_nodes:
        value = value_of(leaf)
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and (value.dim() < 4 or len(token_dims(value, token)) < 2)
        ):
            stack.append(leaf)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return [n for n in gm.graph.nodes if n in seen and n.op.startswith("call")]


def _static(node: Node, tokens: int, picked: set[Node]) -> str:
    name, _ = canonical(node)
    value = value_of(node)
    sized = [n for n in node.all_input_nodes if tokens in _shape(value_of(n))]
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if name in _ATTENTION or not any(isinstance(v, Tensor) for v in parts):
        return ""
    if not sized:
        if any(n in picked for n in node.all_input_nodes):
            picked.add(node)
        numbers = name == "arange" and tokens in _shape(value)
        return "rows are numbered from 0 over the whole call" if numbers else ""
    entry = TABLE.get(name)
    if entry is None:
        return "is not known to keep rows apart"
    if any(n in picked for n in node.all_input_nodes):
        return "puts rows together that were picked, and others"
    if not all(tokens in _shape(v) for v in parts if isinstance(v, Tensor)):
        index = [n for n in sized[1:] if n is not node.all_input_nodes[0]]
        if name not in _PICKS or index:
            return "takes rows together"
        picked.add(node)
        return ""
    return _along(node, name, tokens, sized)


def _along(node: Node, name: str, tokens: int, sized: list[Node]) -> str:
    """What has rows in and out, by the dims that the op works along."""
    entry = TABLE[name]
    rule: Any = entry.rule
    shapes = [_shape(value_of(n)) for n in node.all_input_nodes if isinstance(value_of(n), Tensor)]
    if rule in _APART or entry.view or rule in (row_indexing.embedding, other.expand, other.join, other.factory):
        gathers = name == "getitem" and len(sized) > 1
        return "gathers rows by an index" if gathers else ""
    if rule is row_indexing.one_hot:
        return ""
    if name in ("matmul", "mm", "bmm"):
        summed = len(shapes) > 1 and tokens == shapes[0][-1] and tokens == shapes[1][-2 if len(shapes[1]) > 1 else 0]
        return "a product sums over the token dim" if summed else ""
    dims = _dims(node)
    if dims is None:
        return "is not known to keep rows apart"
    shape = shapes[0]
    for dim in (d % len(shape) for d in dims):
        if shape[dim] == tokens and not (dim == len(shape) - 1 and tokens in shape[:-1]):
            return f"{name} over the token dim mixes rows"
    return ""


def _shape(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _dims(node: Node) -> tuple[int, ...] | None:
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    found = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(found) if all(is_size(d) for d in found) else None
