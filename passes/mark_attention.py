"""Turn every attention call that is fully understood into ``full_prefill::attention``, and list the others.

Understood are calls that already are the op, and torch's scaled dot product attention over one packed row of tokens,
with no mask or with a mask that is recognised by what it computes.  Nothing is approximated: a call with one unknown
fact stays as it is and is refused by node and source line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fullgraph_compile.ops import AttentionSite, attention
from fullgraph_compile.passes.common import Refusal, module_path, refusal, value_of
from fullgraph_compile.passes.masks import MaskKind, recognise_mask
from fullgraph_compile.passes.part import NotUnderstood, Part, part_of, remove_unread
from fullgraph_compile.passes.sdpa import SDPA, geometry, read_sdpa, replace_sdpa


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
    sites: list[AttentionSite] = []
    refusals: list[Refusal] = []
    agreed: tuple[str, str | None] | None = None
    told: tuple[str, str | None]
    for node in list(gm.graph.nodes):
        if node.target not in SDPA and node.target not in _OWN:
            continue
        try:
            if node.target in _OWN:
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
            replace_sdpa(gm.graph, call)
        sites.append(site)
    remove_unread(gm.graph, masks.recognised())
    gm.graph.lint()
    gm.recompile()
    requests, positions = agreed or ("one", None)
    return Marked(gm, tuple(sites), tuple(refusals), requests, positions)


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
    return AttentionSite(
        index, node.name, module_path(node), scale=float(scale), left=left, right=right, softcap=float(softcap),
        sinks=sinks is not None, slopes=slopes is not None, dtype=value_of(q).dtype,
        **geometry([value_of(n).shape for n in (q, k, v)], token, token_dim=0),
    )  # fmt: skip


class _Masks:
    """Masks by node, as many layers read one."""

    def __init__(self, token: Any) -> None:
        self.token = token
        self.known: dict[Node, tuple[MaskKind, Part] | str] = {}

    def kind(self, mask: Node, reader: Node) -> MaskKind:
        """What the mask computes at the time that ``reader`` reads it."""
        if mask not in self.known:
            try:
                part = part_of(mask, reader)
                self.known[mask] = recognise_mask(mask, part, self.token), part
            except NotUnderstood as reason:
                self.known[mask] = str(reason)
        found = self.known[mask]
        if isinstance(found, str):
            raise NotUnderstood(found)
        kind, part = found
        if part_of(mask, reader) != part:
            raise NotUnderstood("the mask is changed in place between attention calls")
        return kind

    def recognised(self) -> set[Node]:
        """All operations that decide a recognised mask."""
        return {n for found in self.known.values() if not isinstance(found, str) for n in found[1].nodes}
