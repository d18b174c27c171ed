"""From a traced graph to something that replays: the passes in order, the compiler, the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fullgraph_compile.assembly import (
    WRITES,
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
from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.bucket import Inputs
from fullgraph_compile.captured import Alone, CapturedGraph
from fullgraph_compile.counts import buckets_of, guards, other_branch
from fullgraph_compile.dispatch import Decision, Limits, Reason, decide
from fullgraph_compile.fitting import Fitting
from fullgraph_compile.fixed_size import build_static
from fullgraph_compile.fused_weights import FusedProgram, FusedWeights
from fullgraph_compile.graphs import create_recorder
from fullgraph_compile.ladder import legal_buckets
from fullgraph_compile.ops import attention as attention_op
from fullgraph_compile.options import Options
from fullgraph_compile.passes.autocast_regions import lift_autocast, lower_autocast
from fullgraph_compile.passes.check_row_independence import Proof, check_row_independence
from fullgraph_compile.passes.common import (
    copy_graph,
    expression,
    find_token,
    free_symbols,
    is_weight,
    output_node,
    placeholders,
    refusal,
    token_dims,
    value_of,
)
from fullgraph_compile.passes.drop_grad import drop_grad
from fullgraph_compile.passes.fold_scalars import fold_scalars
from fullgraph_compile.passes.fuse_projections import fuse_projections
from fullgraph_compile.passes.mark_attention import mark_attention
from fullgraph_compile.passes.pad_to_bucket import Padding, pad_to_bucket
from fullgraph_compile.passes.requests_meet import requests_meet
from fullgraph_compile.passes.split_pieces import split_pieces, written_inputs
from fullgraph_compile.passes.split_tail import Split, split_tail, whole_body
from fullgraph_compile.program import Program
from fullgraph_compile.report import Report, log
from fullgraph_compile.runner import BodyRunner
from fullgraph_compile.static_graph import StaticGraph


def build(
    gm: GraphModule,
    examples: Sequence[Any],
    options: Options,
    report: Report,
    fused: FusedWeights | None = None,
) -> CapturedGraph | StaticGraph:
    """Compile one traced graph.

    Args:
        gm: Dynamo's graph; not changed.
        examples: its inputs, as Dynamo gave them.
        fused: joins the weights of linears that read the same input; None = they stay apart.

    Raises:
        Refused: the graph can run only as it is.
    """
    weights = frozenset(n.name for n, x in zip(placeholders(gm), examples, strict=True) if is_weight(n, x))
    token, why = find_token(gm, lambda n: n.name in weights)
    if why == "static":
        return build_static(gm, weights, options, report)
    if token is None:
        raise Refused(Reason.BATCHED if "symbolic dims" in why else Reason.ARGUMENTS, why)
    return _build_symbolic(gm, examples, token, weights, options, report, fused)


def _build_symbolic(
    gm: GraphModule,
    examples: Sequence[Any],
    token: sympy.Symbol,
    weights: frozenset[str],
    options: Options,
    report: Report,
    fused: FusedWeights | None,
) -> CapturedGraph:
    gm = lift_autocast(fold_scalars(drop_grad(copy_graph(gm))))
    device = device_of(gm, weights)
    move_scalars(gm, weights, device)

    marked = mark_attention(gm, token)
    if marked.refusals:
        raise Refused(Reason.UNMARKED, "; ".join(map(str, marked.refusals)))
    if not marked.sites:
        raise Refused(Reason.NO_SITES)
    report.sites = marked.sites
    attention = attention_for(marked.sites, options, device)

    proof = check_row_independence(marked.gm, token)
    split, blocked, detail = _split(marked.gm, proof)
    if blocked is None and (writers := written_inputs(marked.gm)):
        # The tail would make the write after the body, which may read what was written.
        split, blocked = whole_body(marked.gm), Reason.UNPROVEN
        detail = some_of(proof.refusals) or some_of([refusal(n, WRITES) for n in writers])
    padding = pad_to_bucket(split.body, token)
    if blocked is None and padding.refusals:
        blocked, detail = Reason.UNPROVEN, some_of(padding.refusals)
    if blocked is None and (numbers := _number_inputs(split.body, token)):
        blocked, detail = Reason.SCALAR_INPUT, f"the body reads {', '.join(numbers)}"
    report.proof = _proof_text(proof, split, blocked, detail)
    if blocked is Reason.UNPROVEN and options.unsafe == "error":
        raise Refused(blocked, detail)

    if fused is None:
        pieces = split_pieces(lower_autocast(split.body))
        program = Program(pieces, compile_pieces(pieces, options, report), marked.sites, attention)
    else:
        fusion = fuse_projections(split.body, fused.admit(examples))
        pieces = split_pieces(lower_autocast(fusion.body))
        compiled = compile_pieces(pieces, options, report)
        program = FusedProgram(pieces, compiled, marked.sites, attention, fusion.stacks, fused)
    context = options.context_length or options.max_tokens
    serves, traced, layouts = guards(gm, token)
    ladder, why = buckets_of(options, context, serves, traced)
    if why:
        log.warning("%s: %s; %s", report.name, why, f"buckets left: {list(ladder)}" if ladder else "no bucket is left")
        if blocked is None and not ladder:
            blocked, detail = Reason.NO_BUCKET, why
    kind = graph_kind(options, device)
    if blocked is None and kind == "none":
        blocked = Reason.GRAPHS_OFF
    report.ready = blocked is not None
    runner = BodyRunner(
        program,
        _inputs(split.body, weights, padding),
        outputs_of(split.body, padding),
        Limits(
            ladder,
            options.slots,
            context,
            options.max_padding,
            bool(proof.single_request),
            blocked,
            open_context=options.context_length is None,
        ),
        create_recorder(kind, device),
        device,
        report,
        clone_outputs=options.clone_outputs,
        show_progress=options.show_progress,
        fitting=_fitting(options, kind),
    )
    index = {n.name: i for i, n in enumerate(placeholders(gm))}
    return CapturedGraph(
        runner,
        lower_autocast(split.tail),
        split.tail_inputs,
        token_input=_token_input(gm, token),
        positions=None if marked.positions is None else index[marked.positions],
        detail=detail,
        serves=serves,
        serves_one=layouts,
        other_branch=other_branch(gm, token),
        tail_mixes="" if blocked else some_of(proof.refusals),
        tail_alone=None if blocked else _tail_alone(marked.gm, proof, split, token),
        strict=options.strict,
    )


def _tail_alone(gm: GraphModule, proof: Proof, split: Split, token: sympy.Symbol) -> Alone | None:
    """How to run the tail for each request of a batch alone, where it puts rows together; else None."""
    met = requests_meet(gm, proof, {n.name for n in split.body.graph.nodes})
    if not met:
        return None
    inputs = {i: token_dims(value_of(n), token) for i, n in enumerate(placeholders(gm))}
    sizes = [i for i, n in enumerate(placeholders(gm)) if expression(value_of(n)) == token]
    leaves: Any = output_node(gm).args[0]
    dims = [token_dims(value_of(n), token) if isinstance(n, Node) else () for n in leaves]
    return Alone(
        some_of(met),
        {i: found[0] for i, found in inputs.items() if found},
        tuple(sizes),
        tuple(d[0] if len(d) == 1 else None for d in dims),
    )


def _fitting(options: Options, kind: str) -> Fitting | None:
    """Graphs on a GPU are forecast always, for the report; elsewhere only where something depends on it."""
    if options.measured or options.memory_budget is not None or kind == "cuda":
        return Fitting(options.measured, options.lengths or (), options.memory_budget)
    return None


def _split(gm: GraphModule, proof: Proof) -> tuple[Split, Reason | None, str]:
    """Body and tail, and what blocks the body from a graph.

    A body that is not proven runs at exact sizes, where nothing is padded or cut, so it needs no tail.
    """
    if any(n.name in proof.tainted for n in gm.graph.nodes if n.target is attention_op):
        return whole_body(gm), Reason.UNPROVEN, some_of(proof.refusals)
    try:
        return split_tail(gm, proof), None, ""
    except ValueError as error:
        return whole_body(gm), Reason.UNPROVEN, some_of(proof.refusals) or str(error)


def _proof_text(proof: Proof, split: Split, blocked: Reason | None, detail: str) -> str:
    if blocked is not None:
        return f"not proven safe: {detail}"
    text = "proven safe: no op of the body mixes token rows"
    if proof.single_request:
        text += f"; one request a graph, as {some_of(proof.single_request, 1)}"
    if split.tail_ops:
        text += f"; the last {split.tail_ops} ops run outside of the graph, on real rows"
    return text


def expected_decision(options: Options, batch: PrefillBatch) -> Decision:
    """What the options alone say of a batch, before anything was traced."""
    context = options.context_length or options.max_tokens
    ladder = legal_buckets(options.ladder, context, options.slots)
    blocked = None if ladder else Reason.NO_BUCKET
    if graph_kind(options, batch.device) == "none":
        blocked = Reason.GRAPHS_OFF
    limits = Limits(
        ladder, options.slots, context, options.max_padding, blocked=blocked, open_context=not options.context_length
    )
    if batch.cache is not None:
        limits = limits.over_cache(batch.cache.capacity)
    return decide(batch.tokens, batch.requests, batch.longest, limits)


def _number_inputs(body: GraphModule, token: sympy.Symbol) -> list[str]:
    """Inputs of the body that are symbolic numbers, or tensors with a symbolic size, other than the token count.

    A graph would keep their first value, or their first size.
    """

    def other(value: Any) -> bool:
        if isinstance(value, Tensor):
            return any(free_symbols(size) - {token} for size in value.shape)
        return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and expression(value) != token

    return [node.name for node in placeholders(body) if node.users and other(value_of(node))]


def _inputs(body: GraphModule, weights: frozenset[str], padding: Padding) -> Inputs:
    sizes, weight_indices, values = [], [], []
    for i, node in enumerate(placeholders(body)):
        value = value_of(node)
        if not isinstance(value, Tensor):
            sizes.append(i)
        elif not node.users:
            continue
        elif node.name in weights:
            weight_indices.append(i)
        elif i not in padding.inputs:
            values.append(i)
    used = {i: dim for i, dim in padding.inputs.items() if placeholders(body)[i].users}
    return Inputs(tuple(sizes), used, tuple(weight_indices), tuple(values), weight_forms(body, weight_indices))


def _token_input(gm: GraphModule, token: sympy.Symbol) -> tuple[int, int]:
    """Index and dim of an input that tells the token count."""
    for i, node in enumerate(placeholders(gm)):
        value = value_of(node)
        if isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                if expression(size) == token:
                    return i, dim
    raise Refused(Reason.ARGUMENTS, f"no input has a dim of exactly {token}")
