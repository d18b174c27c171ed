"""The padding proof: does a row of the output ignore the rows past the real total, and does it ignore other requests?

The token dim is followed through every node of a traced graph by the rules of ``row_rules``.  A node that no rule
accepts is refused with its source line; what depends on it is tainted, not refused again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from . import row_checks as check
from . import row_rules
from .common import Refusal, is_weight, refusal, value_of
from .row_memory import canonical, memory, target_of
from .row_state import (
    SIZE,
    SORTED,
    UNIFORM,
    Call,
    Crossed,
    Many,
    Padded,
    Positions,
    Refused,
    Rows,
    Size,
    State,
    Uniform,
)


@dataclass(frozen=True)
class Proof:
    """What is proven of a graph.  Node names, not nodes: they survive a copy of the graph.

    ``refusals``: why it is not padding-safe, in graph order, each root cause once.  ``single_request``: why rows are
    not request-separable although padding-safe.  ``rows``: nodes with one row a token, in token order.  ``tainted``:
    refused nodes and all that depends on them.  ``uniform``: nodes that depend on no token row (weights, constants).
    """

    token: sympy.Symbol
    refusals: tuple[Refusal, ...]
    single_request: tuple[Refusal, ...]
    rows: frozenset[str]
    tainted: frozenset[str]
    uniform: frozenset[str]

    @property
    def padding_safe(self) -> bool:
        """A row of the output ignores rows past the real total."""
        return not self.refusals

    @property
    def request_separable(self) -> bool:
        """A row of the output ignores other requests, too (attention asks the batch who is who)."""
        return self.padding_safe and not self.single_request

    def __str__(self) -> str:
        if not self.padding_safe:
            head, reasons = "not padding-safe: rows past the real total may change real rows", self.refusals
        elif self.single_request:
            head, reasons = "padding-safe, for one request a call", self.single_request
        else:
            head, reasons = "padding-safe and request-separable", ()
        return "\n".join([f"{head} ({len(self.rows)} tensors in rows)", *(f"  {r}" for r in reasons)])


def check_row_independence(gm: GraphModule, token: sympy.Symbol) -> Proof:
    """Follow the token dim, whose size is ``token``, through a graph traced by Dynamo.  The graph is not changed.

    Attention must be ``full_prefill::attention`` already; any other attention call is refused.
    """
    return _Prover(gm, token).run()


class _Prover:
    def __init__(self, gm: GraphModule, token: sympy.Symbol) -> None:
        self.gm, self.token = gm, token
        self.states: dict[Node, State] = {}
        self.tainted: set[Node] = set()
        self.roots: dict[Node, frozenset[Hashable]] = {}
        """The memory that a node may share: placeholders and fresh results, by node (and item, for containers)."""
        self.dirty: set[Hashable] = set()
        """Memory that a refused op has written to."""
        self.refusals: dict[Node, Refusal] = {}
        self.single: dict[Node, Refusal] = {}

    def run(self) -> Proof:
        for node in self.gm.graph.nodes:
            self.roots[node] = memory(node, self.roots)
            inputs = node.all_input_nodes
            if self.roots[node] & self.dirty or any(n in self.tainted or self.roots[n] & self.dirty for n in inputs):
                self.taint(node)
                continue
            try:
                self.states[node] = self.visit(node)
            except Refused as e:
                self.refusals[node] = refusal(node, str(e))
                self.taint(node)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                # A form of the call that no rule was written for: the proof must not guess, and a backend not raise.
                self.refusals[node] = refusal(node, "is called in a way that is not understood")
                self.taint(node)
        for node in self.gm.graph.nodes:  # the output may have blamed an early node
            if any(n in self.tainted for n in node.all_input_nodes):
                self.tainted.add(node)
        order = {n: i for i, n in enumerate(self.gm.graph.nodes)}
        proven = {n: s for n, s in self.states.items() if n not in self.tainted}
        return Proof(
            self.token,
            tuple(self.refusals[n] for n in sorted(self.refusals, key=order.__getitem__)),
            tuple(self.single[n] for n in sorted(self.single, key=order.__getitem__)),
            frozenset(
                n.name
                for n, s in proven.items()
                if (isinstance(s, Rows) and s.inner == 1 and s.order is None)
                or (isinstance(s, Positions) and s.inner == 1)
            ),
            frozenset(n.name for n in self.tainted),
            frozenset(n.name for n, s in proven.items() if isinstance(s, Uniform)),
        )

    def taint(self, node: Node) -> None:
        self.tainted.add(node)
        if node.op.startswith("call") and canonical(node)[1]:
            self.dirty |= self.roots.get(target_of(node), frozenset())

    def visit(self, node: Node) -> State:
        if node.op in ("placeholder", "get_attr"):
            return self.enter(node)
        if node.op == "output":
            return self.leave(node)
        if node.op == "call_module":
            raise Refused("calls a module that was not traced")
        name, writes = canonical(node)
        call = Call(node, name, self.token, self.states, self.note_single)
        if self.is_sym(call):
            return SIZE
        entry = row_rules.TABLE.get(name)
        if entry is None:
            raise Refused(row_rules.REASONS.get(name, row_rules.UNKNOWN))
        if not entry.sizes:
            check.not_a_value(call, *node.args, *node.kwargs.values())
        if writes:
            self.may_write(call, entry)
        if node.kwargs.get("out") is not None:
            raise Refused("writes into a tensor given as out=")
        plain = not entry.always and not call.mentions((*node.args, *node.kwargs.values()))
        if plain and call.tensors() and all(self.states[n] in (UNIFORM, SIZE) for n in node.all_input_nodes):
            state = _uniform(call.value)
        else:
            state = entry.rule(call)
        self.check_shape(call, state, call.value)
        if writes:
            self.write(call, state)
        return state

    def enter(self, node: Node) -> State:
        value = value_of(node)
        if value is None and node.op == "get_attr":
            return UNIFORM
        if not isinstance(value, Tensor):
            return SIZE if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else UNIFORM
        call = Call(node, node.op, self.token, self.states, self.note_single)
        mentions = [d for d, s in enumerate(call.shape()) if call.has_token(s)]
        if not mentions:
            return UNIFORM
        inner = call.factor(call.shape()[mentions[0]])
        return Crossed() if len(mentions) > 1 or inner is None else Rows(mentions[0], inner)

    def leave(self, node: Node) -> State:
        for n in nodes_in_tree(node.args):
            if n in self.tainted:
                continue
            state = self.states[n]
            if isinstance(state, Rows) and state.order is not None:
                self.blame(state.order, "sorts rows, and they leave the graph in that order")
            elif isinstance(state, SORTED):
                self.blame(state.order, "sorts rows, and a sorting index or count leaves the graph")
            elif isinstance(state, Padded):
                self.blame(n, "rows leave the graph shifted by a padding")
            elif isinstance(state, Positions):
                self.note_single(state.origin, "rows are numbered from 0 over the whole call")
            elif isinstance(state, Crossed):
                self.blame(n, "an input with two token dims leaves the graph")
            elif isinstance(state, Many):
                self.blame(n, "a container leaves the graph as it is")
        return UNIFORM

    def blame(self, node: Node, reason: str) -> None:
        self.refusals.setdefault(node, refusal(node, reason))
        self.tainted.add(node)

    def note_single(self, node: Node, reason: str) -> None:
        self.single.setdefault(node, refusal(node, reason))

    def is_sym(self, call: Call) -> bool:
        """Arithmetic of sizes: only numbers in, only a number out."""
        inputs = call.node.all_input_nodes
        numeric = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
        return (
            bool(inputs) and all(isinstance(self.states[n], Size) for n in inputs) and isinstance(call.value, numeric)
        )

    def check_shape(self, call: Call, state: State, value: Any) -> None:
        """The result must look as its state says: one token dim, where the rule put it."""
        if isinstance(state, Many):
            for s, v in zip(state.items, value, strict=True):
                self.check_shape(call, s, v)
            return
        if not isinstance(value, Tensor):
            if not isinstance(state, Size) and call.name != "setitem":
                raise Refused("returns something that is not understood")
            return
        if isinstance(state, Padded):
            return
        shape = call.shape(value)
        check.one_token_dim(call, shape)
        if isinstance(state, Rows):
            check.followed(call, call.factor(shape[state.axis]) == state.inner)
        if isinstance(state, Uniform):
            check.followed(call, not any(call.has_token(s) for s in shape))

    def may_write(self, call: Call, entry: row_rules.Op) -> None:
        target = target_of(call.node)
        if not isinstance(target, Node) or (entry.view and entry.inplace is None):
            raise Refused("changes a tensor's shape in place")
        for root in self.roots[target]:
            if isinstance(root, Node) and root.op in ("placeholder", "get_attr"):
                check.not_a_root("a parameter or buffer" if is_weight(root) else "an input of the call")

    def write(self, call: Call, state: State) -> None:
        """Bring the states of all that shares the written memory up to date."""
        target = target_of(call.node)
        assert isinstance(target, Node)
        group = [n for n, r in self.roots.items() if r & self.roots[target] and n in self.states]
        if isinstance(state, SORTED):
            check.not_shared(group != [target])
            self.states[target] = state
            return
        check.not_shared(any(isinstance(self.states[n], SORTED) for n in group))
        if _changed(state) != _changed(self.states[target]):
            raise Refused("writes rows into a tensor that has none")
        for n in group + [r[0] for r in self.roots[target] if isinstance(r, tuple)]:
            self.states[n] = _changed(self.states[n])


def _changed(state: State) -> State:
    """The state of what has been written to, row by row: no longer a sort's keys, nor plain positions."""
    if isinstance(state, Positions):
        return Rows(0, state.inner)
    if isinstance(state, Many):
        return Many(tuple(_changed(s) for s in state.items))
    return replace(state, keys=False) if isinstance(state, Rows) else state


def _uniform(value: Any) -> State:
    if isinstance(value, Tensor):
        return UNIFORM
    if isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value):
        return Many(tuple(_uniform(v) for v in value))
    return SIZE


def nodes_in_tree(x: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(x, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found
