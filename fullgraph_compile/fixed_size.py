"""A graph of one fixed size: run as it was traced, captured as one bucket if it comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fullgraph_compile.assembly import (
    Refused,
    attention_for,
    compile_pieces,
    device_of,
    graph_kind,
    move_scalars,
    outputs_of,
    some_of,
    weight_forms,
)
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.bucket import Inputs
from fullgraph_compile.compilers import TraceAgain
from fullgraph_compile.dispatch import Limits, Reason
from fullgraph_compile.graphs import create_recorder
from fullgraph_compile.options import Options
from fullgraph_compile.passes.check_row_independence import check_row_independence
from fullgraph_compile.passes.common import (
    copy_graph,
    find_token,
    is_weight,
    op_name,
    output_node,
    placeholders,
    refusal,
    value_of,
)
from fullgraph_compile.passes.mark_attention import mark_attention
from fullgraph_compile.passes.pad_to_bucket import Padding
from fullgraph_compile.passes.requests_meet import might_meet, requests_meet, rows_made_of
from fullgraph_compile.passes.split_pieces import Pieces, written_inputs
from fullgraph_compile.passes.split_tail import whole_body
from fullgraph_compile.program import Program
from fullgraph_compile.report import Report
from fullgraph_compile.runner import BodyRunner
from fullgraph_compile.static_graph import StaticGraph


def build_static(gm: GraphModule, weights: frozenset[str], options: Options, report: Report) -> StaticGraph:
    tokens = _static_tokens(gm, weights)
    device = device_of(gm, weights)
    context = torch._guards.TracingContext.try_get()

    if options.attention != "auto":
        # A name that cannot be had here is an error at the first call, not at the first that is captured.
        attention_for(mark_attention(gm, sympy.Integer(tokens)).sites, options, device)
    report.ready = True  # there is nothing to capture unless this size comes back

    def make_runner() -> BodyRunner:
        with torch._guards.tracing(context):
            try:
                return _static_runner(gm, tokens, weights, device, options, report)
            except TraceAgain:  # Dynamo is not there to hear it
                as_traced = dataclasses.replace(options, compiler="eager")
                return _static_runner(gm, tokens, weights, device, as_traced, report)

    return StaticGraph(gm, tokens, make_runner, separates(gm), report, device=device, strict=options.strict)


def _static_tokens(gm: GraphModule, weights: frozenset[str]) -> int:
    """Token count of a graph without symbols.

    Raises:
        Refused: its first input has a batch dim above 1.
    """
    for node in placeholders(gm):
        value = value_of(node)
        if not isinstance(value, Tensor) or node.name in weights or not value.dim():
            continue
        rows = 2 if value.dtype.is_floating_point or value.dtype.is_complex else 1
        batch = value.shape[:-rows]
        if len(batch) and batch[0] != 1:
            raise Refused(Reason.BATCHED, f"{node.name} has shape {tuple(value.shape)}")
        return int(value.shape[-rows])
    raise Refused(Reason.ARGUMENTS, "no call input is a tensor with rows")


def _static_runner(
    gm: GraphModule, tokens: int, weights: frozenset[str], device: torch.device, options: Options, report: Report
) -> BodyRunner:
    """One bucket of exactly the traced size: no padding, so nothing to prove, and the model's own attention."""
    gm = copy_graph(gm)
    move_scalars(gm, weights, device)
    split = whole_body(gm)
    blocked: Reason | None = None
    if numbers := [n for n in gm.graph.nodes if op_name(n) == "item"]:
        # Dynamo is not there to guard on a number that is made constant now.
        blocked, options = Reason.SCALAR_INPUT, dataclasses.replace(options, compiler="eager")
        report.details[blocked] = some_of([refusal(n, "reads an input on the host") for n in numbers])
    if written := written_inputs(split.body):
        blocked = Reason.UNPROVEN
        report.details[blocked] = some_of(
            [refusal(n, "writes to an input, which a replay would not show") for n in written]
        )
    returned: Any = output_node(gm).args[0]
    if leaves := [n for n in returned if not isinstance(n, Node) or n.op == "placeholder"]:
        blocked = Reason.ARGUMENTS
        report.details[blocked] = f"the call returns {leaves[0]}, which is no result of the graph"
    kind = graph_kind(options, device)
    if blocked is None and kind == "none":
        blocked = Reason.GRAPHS_OFF
    nodes = placeholders(split.body)
    pieces = Pieces.whole(split.body, tuple(value_of(n) for n in nodes))
    held = tuple(i for i, n in enumerate(nodes) if n.name in weights)
    inputs = Inputs(
        (),
        {},
        held,
        tuple(i for i, n in enumerate(nodes) if n.name not in weights and isinstance(value_of(n), Tensor)),
        weight_forms(split.body, held),
    )
    return BodyRunner(
        Program(pieces, compile_pieces(pieces, options, report), (), ReferenceAttention()),
        inputs,
        outputs_of(split.body, Padding({}, (None,) * len(pieces.outputs), ())),
        Limits((tokens,), 1, tokens, blocked=blocked),
        create_recorder(kind, device),
        device,
        report,
        clone_outputs=options.clone_outputs,
        show_progress=options.show_progress,
    )


def separates(gm: GraphModule) -> Callable[[], bool]:
    """Whether the graph as it was traced tells the requests of a packed call apart: its attention by the op or by its
    masks, and nothing else in it puts rows together.

    A mask that is an input of the graph is the caller's own, as where Dynamo has cut a model in front of its layers.
    """

    @cache
    def ask() -> bool:
        calls = [n for n in gm.graph.nodes if op_name(n) == "scaled_dot_product_attention"]
        if not calls and any(op_name(n) == "softmax" for n in gm.graph.nodes):
            return False  # it may be attention that is written out
        masks: list[Any] = [n.kwargs.get("attn_mask", n.args[3] if len(n.args) > 3 else None) for n in calls]
        given = bool(calls) and all(isinstance(m, Node) and m.op == "placeholder" for m in masks)
        weights = frozenset(n.name for n in placeholders(gm) if is_weight(n))
        token, why = find_token(gm, lambda n: n.name in weights)
        rest = gm
        try:
            fixed = _static_tokens(gm, weights) if why == "static" else None
            token = token if fixed is None else sympy.Integer(fixed)
            if calls and not given:
                marked = None if token is None else mark_attention(gm, token)
                if marked is None or marked.refusals or marked.requests == "one":
                    return False
                rest = marked.gm
        except Refused:
            return False
        if fixed is not None:
            return not might_meet(rest, fixed)
        if given or token is None:
            return True
        matters = {n.name for n in rows_made_of(rest, token)}
        others = {n.name for n in rest.graph.nodes} - matters
        return not requests_meet(rest, check_row_independence(rest, token), others)

    return ask
