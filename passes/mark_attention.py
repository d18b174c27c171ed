"""Turn every attention call that is fully understood into ``full_prefill::attention``, and list the others.

Understood are calls that already are the op, torch's scaled dot product attention over one packed row of tokens, and
the same written out as products and a softmax, with no mask or with masks and ALiBi that are recognised by what they
compute.  Nothing is approximated: a call with one unknown fact stays as it is and is refused by node and source line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fullgraph_compile.ops import AttentionSite, attention
from fullgraph_compile.passes.alibi import recognise_slopes
from fullgraph_compile.passes.common import Refusal, module_path, refusal, value_of
from fullgraph_compile.passes.masks import MaskKind, recognise_mask
from fullgraph_compile.passes.part import NotUnderstood, Part, part_of, remove_unread
from fullgraph_compile.passes.sdpa import SDPA, SdpaCall, emit, geometry, read_sdpa, replace_sdpa
from fullgraph_compile.passes.written_out import is_attention, read_written_out, scores_of


@dataclass(frozen=True)
class Marked:
    """A graph whose attention calls are sites.

    Attributes:
        gm: a new graph with the placeholders of the given one, in order and by name; the given one is unchanged.
        sites: in graph order, numbered from 0; the last argument of each call, ``site``, is the index.
        refusals: attention calls that were not understood; they are in ``gm`` as they were.
        requests: how the model itself tells requests apart. "one": all tokens are one request. "positions": a request
            starts at each token whose position is not the last token's plus one. "batch": the op was in the graph
            already, and the active batch tells.
        positions: name of the placeholder of the positions, if ``requests`` is "positions".
    """

    gm: GraphModule
    sites: tuple[AttentionSite, ...]
    refusals: tuple[Refusal, ...]
    requests: str
    positions: str | None


def mark_attention(gm: GraphModule, token: Any) -> Marked:
    """Mark the attention calls of a traced graph.

    Sites must agree on how requests are told apart; those that differ from the first one are refused.

    Args:
        gm: Dynamo's graph; its nodes have ``example_value`` fakes on any device.
        token: the sympy symbol of the token count.
    """
    gm = _copy(gm)
    masks = _Masks(token)
    slopes = _Slopes(gm.graph)
    inside: set[Node] = set()
    sites: list[AttentionSite] = []
    refusals: list[Refusal] = []
    agreed: tuple[str, str | None] | None = None
    told: tuple[str, str | None]
    for node in list(gm.graph.nodes):
        if node.target is _FLEX:
            refusals.append(refusal(node, "what the score and mask functions of flex_attention compute is not read"))
            continue
        written_out = is_attention(node, token)
        if node.target not in SDPA and node.target not in _OWN and not written_out:
            continue
        found = None
        try:
            if written_out:
                call, found = read_written_out(node, len(sites), token, masks.kind, masks.slopes)
                site, told = call.site, (call.mask.requests, call.mask.positions)
            elif node.target in _OWN:
                call, told = None, ("batch", None)
                site = _read_op(node, len(sites), token)
            else:
                call = read_sdpa(node, len(sites), token, masks.kind)
                site, told = call.site, (call.mask.requests, call.mask.positions)
            if told != (agreed or told):
                raise NotUnderstood(f"requests are told apart by {_told(told)}, but by {_told(agreed)} at other calls")
        except NotUnderstood as reason:
            refusals.append(refusal(node, str(reason)))
            continue
        agreed = told
        if call is None:
            node.args, node.kwargs = (*_op_arguments(node)[:-1], len(sites)), {}
        else:
            if written_out:
                inside |= scores_of(call.node, token)
            replace_sdpa(gm.graph, call, None if found is None else slopes.node(found, call))
        sites.append(site)
    remove_unread(gm.graph, masks.recognised() | inside)
    gm.graph.lint()
    gm.recompile()
    requests, positions = agreed or ("one", None)
    return Marked(gm, tuple(sites), tuple(refusals), requests, positions)


_FLEX = torch.ops.higher_order.flex_attention
_OWN = frozenset({attention, torch.ops.full_prefill.attention})


def _told(how: tuple[str, str | None] | None) -> str:
    kind, positions = how or ("one", None)
    return {"one": "nothing (all tokens are one)", "batch": "the batch"}.get(kind, f"restarts of {positions}")


def _copy(gm: GraphModule) -> GraphModule:
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    copy = GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    return copy


def _op_arguments(node: Node) -> list[Any]:
    names = [a.name for a in attention._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return [given[n] for n in names]


def _read_op(node: Node, index: int, token: Any) -> AttentionSite:
    q, k, v, sinks, slopes, scale, left, right, softcap, _ = _op_arguments(node)
    for name, fact in {"scale": scale, "left": left, "right": right, "softcap": softcap}.items():
        if not isinstance(fact, (int, float)):
            raise NotUnderstood(f"{name} is not a constant of the trace")
    if len(dtypes := {str(value_of(n).dtype) for n in (q, k, v)}) > 1:
        raise NotUnderstood(f"queries, keys and values are {' and '.join(sorted(dtypes))}; the op takes one dtype")
    return AttentionSite(
        index, node.name, module_path(node), scale=float(scale), left=left, right=right, softcap=float(softcap),
        sinks=sinks is not None, slopes=slopes is not None, dtype=value_of(q).dtype,
        **geometry([value_of(n).shape for n in (q, k, v)], token, token_dim=0),
    )  # fmt: skip


class _Masks:
    """Masks and biases by node, as many layers read one."""

    def __init__(self, token: Any) -> None:
        self.token = token
        self.known: dict[tuple[Any, ...], tuple[Any, Part] | str] = {}

    def kind(self, mask: Node, reader: Node, hides: bool = False, factor: float = 1.0) -> MaskKind:
        """What the mask computes at the time that ``reader`` reads it."""
        how = (hides, factor)
        return self._known(mask, reader, how, lambda part: recognise_mask(mask, part, self.token, hides, factor))

    def slopes(self, bias: Node, reader: Node, heads: int) -> tuple[float, ...]:
        """The ALiBi slopes that the bias adds."""
        return self._known(bias, reader, heads, lambda part: recognise_slopes(bias, part, self.token, heads))

    def _known(self, node: Node, reader: Node, how: Any, recognise: Callable[[Part], Any]) -> Any:
        key = node, how
        if key not in self.known:
            try:
                part = part_of(node, reader)
                self.known[key] = recognise(part), part
            except NotUnderstood as reason:
                self.known[key] = str(reason)
        found = self.known[key]
        if isinstance(found, str):
            raise NotUnderstood(found)
        value, part = found
        if part_of(node, reader) != part:
            raise NotUnderstood("the mask is changed in place between attention calls")
        return value

    def recognised(self) -> set[Node]:
        """All operations that decide a recognised mask or bias."""
        return {n for found in self.known.values() if not isinstance(found, str) for n in found[1].nodes}


class _Slopes:
    """ALiBi slopes as nodes at the start of a graph, one for each set of them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[tuple[float, ...], Node] = {}

    def node(self, slopes: tuple[float, ...], call: SdpaCall) -> Node:
        """``[heads]`` float32 on the call's device: written by kernels, as a graph may not read the host."""
        if slopes not in self.known:
            first = next(n for n in self.graph.nodes if n.op != "placeholder")
            device = value_of(call.q).device
            with self.graph.inserting_before(first):
                parts = [
                    emit(self.graph, call.node, torch.full, (1,), s, dtype=torch.float32, device=device) for s in slopes
                ]
                self.known[slopes] = emit(self.graph, call.node, torch.cat, parts)
        return self.known[slopes]
