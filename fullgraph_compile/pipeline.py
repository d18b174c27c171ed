"""From a traced graph to something that replays: the passes in order, the compiler, the runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fullgraph_compile.attention import AttentionBackend, UnsupportedAttention, create_attention
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.capture import Inputs
from fullgraph_compile.captured import CapturedGraph, StaticGraph
from fullgraph_compile.compilers import TraceAgain, compile_piece
from fullgraph_compile.dispatch import Decision, Limits, Reason, decide
from fullgraph_compile.graphs import create_recorder
from fullgraph_compile.ladder import legal_buckets
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.ops import attention as attention_op
from fullgraph_compile.options import BadOption, Options
from fullgraph_compile.passes.check_row_independence import Proof, check_row_independence
from fullgraph_compile.passes.common import (
    Refusal,
    copy_graph,
    expression,
    find_token,
    free_symbols,
    is_weight,
    op_name,
    output_node,
    placeholders,
    refusal,
    value_of,
)
from fullgraph_compile.passes.fold_scalars import fold_scalars
from fullgraph_compile.passes.mark_attention import mark_attention
from fullgraph_compile.passes.pad_to_bucket import Padding, pad_to_bucket
from fullgraph_compile.passes.split_pieces import Pieces, split_pieces, written_inputs
from fullgraph_compile.passes.split_tail import Split, split_tail, whole_body
from fullgraph_compile.program import Program
from fullgraph_compile.progress import steps
from fullgraph_compile.report import Report, log
from fullgraph_compile.runner import BodyRunner

_WRITES = "writes to an input or a buffer, which a replay would do to its own copy"


class Refused(Exception):
    """Why a traced graph is not captured; caught within the package, never shown to Dynamo."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


def build(gm: GraphModule, examples: Sequence[Any], options: Options, report: Report) -> CapturedGraph | StaticGraph:
    """Compile one traced graph.

    Args:
        gm: Dynamo's graph; not changed.
        examples: its inputs, as Dynamo gave them.

    Raises:
        Refused: the graph can run only as it is.
    """
    weights = frozenset(n.name for n, x in zip(placeholders(gm), examples, strict=True) if is_weight(n, x))
    token, why = find_token(gm, lambda n: n.name in weights)
    if why == "static":
        return _build_static(gm, weights, options, report)
    if token is None:
        raise Refused(Reason.BATCHED if "symbolic dims" in why else Reason.ARGUMENTS, why)
    return _build_symbolic(gm, token, weights, options, report)


def _build_symbolic(
    gm: GraphModule, token: sympy.Symbol, weights: frozenset[str], options: Options, report: Report
) -> CapturedGraph:
    gm = fold_scalars(copy_graph(gm))
    device = _device_of(gm, weights)
    _move_scalars(gm, weights, device)

    marked = mark_attention(gm, token)
    if marked.refusals:
        raise Refused(Reason.UNMARKED, "; ".join(map(str, marked.refusals)))
    if not marked.sites:
        raise Refused(Reason.NO_SITES)
    report.sites = marked.sites
    attention = _attention_for(marked.sites, options, device)

    proof = check_row_independence(marked.gm, token)
    split, blocked, detail = _split(marked.gm, proof)
    if blocked is None and (writers := written_inputs(marked.gm)):
        # The tail would make the write after the body, which may read what was written.
        split, blocked = whole_body(marked.gm), Reason.UNPROVEN
        detail = _some(proof.refusals) or _some([refusal(n, _WRITES) for n in writers])
    padding = pad_to_bucket(split.body, token)
    if blocked is None and padding.refusals:
        blocked, detail = Reason.UNPROVEN, _some(padding.refusals)
    if blocked is None and (numbers := _number_inputs(split.body, token)):
        blocked, detail = Reason.SCALAR_INPUT, f"the body reads {', '.join(numbers)}"
    report.proof = _proof_text(proof, split, blocked, detail)
    if blocked is Reason.UNPROVEN and options.unsafe == "error":
        raise Refused(blocked, detail)

    pieces = split_pieces(split.body)
    program = Program(pieces, _compile(pieces, options, report), marked.sites, attention)
    context = options.context_length or options.max_tokens
    serves = _guards(gm, token)
    ladder = tuple(b for b in legal_buckets(options.ladder, context, options.slots) if serves(b))
    dropped = sorted(set(options.ladder) - set(ladder))
    if dropped:
        why = (
            f"no legal batch fills bucket {', '.join(map(str, dropped))} (context_length {context}, request_slots "
            f"{options.slots})"
        )
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
        _outputs(split.body, padding),
        Limits(ladder, options.slots, context, options.max_padding, bool(proof.single_request), blocked),
        create_recorder(kind, device),
        device,
        report,
        clone_outputs=options.clone_outputs,
        show_progress=options.show_progress,
    )
    index = {n.name: i for i, n in enumerate(placeholders(gm))}
    return CapturedGraph(
        runner,
        split.tail,
        split.tail_inputs,
        token_input=_token_input(gm, token),
        positions=None if marked.positions is None else index[marked.positions],
        detail=detail,
        serves=serves,
        strict=options.strict,
    )


def _attention_for(sites: Sequence[AttentionSite], options: Options, device: torch.device) -> AttentionBackend:
    """The attention backend for the sites.

    Raises:
        BadOption: the one that was named cannot serve them.
        Refused: none can that "auto" may take.
    """
    try:
        return create_attention(options.attention, sites, device)
    except UnsupportedAttention as error:
        if options.attention != "auto":
            raise BadOption(str(error)) from None
        raise Refused(Reason.ATTENTION, str(error)) from None


def _split(gm: GraphModule, proof: Proof) -> tuple[Split, Reason | None, str]:
    """Body and tail, and what blocks the body from a graph.

    A body that is not proven runs at exact sizes, where nothing is padded or cut, so it needs no tail.
    """
    if any(n.name in proof.tainted for n in gm.graph.nodes if n.target is attention_op):
        return whole_body(gm), Reason.UNPROVEN, _some(proof.refusals)
    try:
        return split_tail(gm, proof), None, ""
    except ValueError as error:
        return whole_body(gm), Reason.UNPROVEN, _some(proof.refusals) or str(error)


def _some(refusals: Sequence[Refusal], most: int = 3) -> str:
    text = "; ".join(map(str, refusals[:most]))
    return f"{text}; and {len(refusals) - most} more" if len(refusals) > most else text


def _proof_text(proof: Proof, split: Split, blocked: Reason | None, detail: str) -> str:
    if blocked is not None:
        return f"not proven safe: {detail}"
    text = "proven safe: no op of the body mixes token rows"
    if proof.single_request:
        text += f"; one request a graph, as {_some(proof.single_request, 1)}"
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
    limits = Limits(ladder, options.slots, context, options.max_padding, blocked=blocked)
    return decide(batch.tokens, batch.requests, batch.longest, limits)


def graph_kind(options: Options, device: torch.device) -> str:
    """How graphs are recorded on this device."""
    if options.graphs == "auto":
        return "cuda" if device.type == "cuda" else "none"
    return options.graphs


# -- the symbolic graph ------------------------------------------------------------------------------------------------


def _device_of(gm: GraphModule, weights: frozenset[str]) -> torch.device:
    """Where the body runs: the device of its weights, else of its first tensor with a size."""
    nodes = placeholders(gm)
    for node in sorted(nodes, key=lambda n: n.name not in weights):
        value = value_of(node)
        if isinstance(value, Tensor) and value.dim():
            device = value.device
            if device.type == "cuda" and device.index is None:
                return torch.device("cuda", torch.cuda.current_device())
            return device
    return torch.device("cpu")


def _move_scalars(gm: GraphModule, weights: frozenset[str], device: torch.device) -> None:
    """Let 0-d CPU inputs stand for 0-d tensors on the device: a graph reads them from a static buffer there."""
    if device.type == "cpu":
        return
    for node in placeholders(gm):
        value = value_of(node)
        if isinstance(value, Tensor) and node.name not in weights and not value.dim() and value.device.type == "cpu":
            with value.fake_mode:  # type: ignore[attr-defined]
                node.meta["example_value"] = torch.empty((), dtype=value.dtype, device=device)


def _number_inputs(body: GraphModule, token: sympy.Symbol) -> list[str]:
    """Inputs of the body that are symbolic numbers, or tensors with a symbolic size, other than the token count.

    A graph would keep their first value, or their first size.
    """

    def other(value: Any) -> bool:
        if isinstance(value, Tensor):
            return any(free_symbols(size) - {token} for size in value.shape)
        return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and expression(value) != token

    return [node.name for node in placeholders(body) if node.users and other(value_of(node))]


def _compile(pieces: Pieces, options: Options, report: Report) -> tuple[Any, ...]:
    """Compile each distinct piece once.  One that the compiler refuses is interpreted, and the log says so."""
    compiled = []
    for i, kind in enumerate(
        steps(pieces.kinds, f"compiling ({options.compiler})", show=options.show_progress, total=len(pieces.kinds))
    ):
        compiler = "eager" if i in pieces.interpret else options.compiler
        try:
            compiled.append(compile_piece(kind, pieces.examples[i], compiler))
        except TraceAgain:
            raise
        except Exception as error:
            log.warning("%s: piece %d is run as traced, %s refused it: %r", report.name, i, compiler, error)
            compiled.append(kind.forward)
    return tuple(compiled)


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
    return Inputs(tuple(sizes), used, tuple(weight_indices), tuple(values), _forms(body, weight_indices))


def _forms(body: GraphModule, weights: Sequence[int]) -> dict[int, tuple[torch.dtype, tuple[int, ...]]]:
    nodes = placeholders(body)
    return {i: (value_of(nodes[i]).dtype, tuple(value_of(nodes[i]).shape)) for i in weights}


def _outputs(body: GraphModule, padding: Padding) -> list[tuple[Tensor, int | None]]:
    leaves = output_node(body).args[0]
    return [(value_of(n), dim) for n, dim in zip(leaves, padding.outputs, strict=True)]  # type: ignore[arg-type]


def _token_input(gm: GraphModule, token: sympy.Symbol) -> tuple[int, int]:
    """Index and dim of an input that tells the token count."""
    for i, node in enumerate(placeholders(gm)):
        value = value_of(node)
        if isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                if expression(size) == token:
                    return i, dim
    raise Refused(Reason.ARGUMENTS, f"no input has a dim of exactly {token}")


def _guards(gm: GraphModule, token: sympy.Symbol) -> Callable[[int], bool]:
    """Whether Dynamo's guards on a backed token count hold for a count: for another the model may take another branch,
    so the graph would compute something else."""
    sizes = [v for n in placeholders(gm) if isinstance(v := value_of(n), torch.SymInt) and expression(v) == token]
    env = sizes[0].node.shape_env if sizes else None
    if env is None or free_unbacked_symbols(sizes[0]):
        return lambda tokens: True
    known: dict[int, bool] = {}

    def serves(tokens: int) -> bool:
        if tokens not in known:
            bounds = env.var_to_range.get(token)
            # The lower bound of 2 is that of a size that was told nothing of 0 and 1; it is no branch.
            inside = bounds is None or (bounds.lower <= max(tokens, 2) and tokens <= bounds.upper)
            conditions = [g.expr for g in env.guards if g.expr.free_symbols == {token}]
            known[tokens] = bool(inside) and all(c.subs(token, tokens) != sympy.false for c in conditions)
        return known[tokens]

    return serves


# -- a graph of one fixed size -----------------------------------------------------------------------------------------


def _build_static(gm: GraphModule, weights: frozenset[str], options: Options, report: Report) -> StaticGraph:
    tokens = _static_tokens(gm, weights)
    device = _device_of(gm, weights)
    context = torch._guards.TracingContext.try_get()

    if options.attention != "auto":
        # A name that cannot be had here is an error at the first call, not at the first that is captured.
        _attention_for(mark_attention(gm, sympy.Integer(tokens)).sites, options, device)
    report.ready = True  # there is nothing to capture unless this size comes back

    def make_runner() -> BodyRunner:
        with torch._guards.tracing(context):
            try:
                return _static_runner(gm, tokens, weights, device, options, report)
            except TraceAgain:  # Dynamo is not there to hear it
                as_traced = dataclasses.replace(options, compiler="eager")
                return _static_runner(gm, tokens, weights, device, as_traced, report)

    return StaticGraph(gm, tokens, make_runner, separates(gm), report, device=device, strict=options.strict)


def separates(gm: GraphModule) -> Callable[[], bool]:
    """Whether the graph's own attention tells the requests of a packed call apart: by the op, or by its masks.

    A mask that is an input of the graph is the caller's own, as where Dynamo has cut a model in front of its layers.
    """

    @cache
    def ask() -> bool:
        calls = [n for n in gm.graph.nodes if op_name(n) == "scaled_dot_product_attention"]
        if not calls:
            # The op, or no attention at all; a softmax may be attention that is written out.
            return all(op_name(n) != "softmax" for n in gm.graph.nodes)
        masks: list[Any] = [n.kwargs.get("attn_mask", n.args[3] if len(n.args) > 3 else None) for n in calls]
        if all(isinstance(m, Node) and m.op == "placeholder" for m in masks):
            return True
        weights = frozenset(n.name for n in placeholders(gm) if is_weight(n))
        token, why = find_token(gm, lambda n: n.name in weights)
        try:
            if why == "static":
                token = sympy.Integer(_static_tokens(gm, weights))
            marked = None if token is None else mark_attention(gm, token)
        except Refused:
            return False
        return marked is not None and not marked.refusals and marked.requests != "one"

    return ask


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
    _move_scalars(gm, weights, device)
    split = whole_body(gm)
    blocked: Reason | None = None
    if numbers := [n for n in gm.graph.nodes if op_name(n) == "item"]:
        # Dynamo is not there to guard on a number that is made constant now.
        blocked, options = Reason.SCALAR_INPUT, dataclasses.replace(options, compiler="eager")
        report.details[blocked] = _some([refusal(n, "reads an input on the host") for n in numbers])
    if written := written_inputs(split.body):
        blocked = Reason.UNPROVEN
        report.details[blocked] = _some(
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
        _forms(split.body, held),
    )
    return BodyRunner(
        Program(pieces, _compile(pieces, options, report), (), ReferenceAttention()),
        inputs,
        _outputs(split.body, Padding({}, (None,) * len(pieces.outputs), ())),
        Limits((tokens,), 1, tokens, blocked=blocked),
        create_recorder(kind, device),
        device,
        report,
        clone_outputs=options.clone_outputs,
        show_progress=options.show_progress,
    )
