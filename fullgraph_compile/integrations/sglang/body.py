"""The body of an SGLang model, traced and compiled once for all token counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from fullgraph_compile.assembly import WRITES, compile_pieces, some_of
from fullgraph_compile.compilers import Compiled, TraceAgain
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.sglang.attention import HostedCall, Sites, number_calls
from fullgraph_compile.integrations.sglang.settings import Settings
from fullgraph_compile.passes.autocast_regions import lift_autocast, lower_autocast
from fullgraph_compile.passes.check_row_independence import check_row_independence
from fullgraph_compile.passes.common import copy_graph, find_token, is_weight, output_node, placeholders, refusal
from fullgraph_compile.passes.fold_scalars import fold_scalars
from fullgraph_compile.passes.keep_rounding import keep_rounding
from fullgraph_compile.passes.pad_to_bucket import pad_to_bucket
from fullgraph_compile.passes.split_pieces import PieceCall, Pieces, split_pieces, written_inputs
from fullgraph_compile.report import Report, first_lines

# Traces of one body: its code may branch on the token count a few times, not for each bucket anew.
MOST_TRACES = 8


class NotCompiled(Exception):
    """Why the body of a model is not compiled."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class HostedProgram:
    """A plain loop over compiled pieces and SGLang's attention; under SGLang's capture it becomes one graph."""

    pieces: Pieces
    compiled: tuple[Compiled, ...]
    calls: tuple[HostedCall, ...]
    sites: Sites

    def __call__(self, *inputs: Any) -> list[Any]:
        self.sites.begin()
        values: list[Any] = [*inputs, *[None] * (self.pieces.slots - len(inputs))]
        for step in self.pieces.steps:
            operands = [None if i is None else values[i] for i in step.inputs]
            if isinstance(step, PieceCall):
                results = self.compiled[step.kind](*operands)
                for slot, result in zip(step.outputs, results, strict=True):
                    values[slot] = result
                del results
            else:
                values[step.output] = self.sites.call(self.calls[step.site], operands)
            del operands
            for slot in step.drop:
                values[slot] = None
        return [values[slot] for slot in self.pieces.outputs]


def build(gm: GraphModule, examples: Sequence[Any], sites: Sites, settings: Settings, report: Report) -> HostedProgram:
    """Prove, cut and compile one traced graph.

    Args:
        gm: Dynamo's graph; not changed.
        examples: its inputs, as Dynamo gave them.

    Raises:
        NotCompiled: padding is not proven safe, or the graph is not one that the plugin can serve.
    """
    weights = frozenset(n.name for n, x in zip(placeholders(gm), examples, strict=True) if is_weight(n, x))
    token, why = find_token(gm, lambda n: n.name in weights)
    if token is None:
        raise NotCompiled(Reason.ARGUMENTS, f"no symbolic token count was traced: {why}")
    gm = lift_autocast(fold_scalars(copy_graph(gm)))
    calls = number_calls(gm)
    if not calls:
        raise NotCompiled(Reason.NO_SITES, "SGLang's attention modules are not called by the body")
    _prove(gm, token, report)
    # SGLang's own kernels write their results to memory: with the same roundings answers are nearer to theirs.
    pieces = split_pieces(lower_autocast(keep_rounding(gm)))
    return HostedProgram(pieces, compile_pieces(pieces, settings.compile_options, report), calls, sites)


def _prove(gm: GraphModule, token: Any, report: Report) -> None:
    """SGLang's graphs hold padded rows and several requests, so no row of the body may see another."""
    proof = check_row_independence(gm, token)
    refusals = [*proof.refusals, *proof.single_request]
    refusals += [refusal(n, WRITES) for n in written_inputs(gm)]
    padding = pad_to_bucket(gm, token)
    refusals += padding.refusals
    leaves = output_node(gm).args[0]
    for leaf, dim in zip(leaves, padding.outputs, strict=True):  # type: ignore[arg-type]
        # What a refused op leads to is no cause of its own.
        named = isinstance(leaf, torch.fx.Node) and leaf.name not in proof.tainted
        if named and (dim != 0 or leaf.name not in proof.rows):
            refusals.append(refusal(leaf, "leaves the body not as rows, which SGLang would cut"))
    if refusals:
        report.proof = f"not proven safe: {some_of(refusals)}"
        raise NotCompiled(Reason.UNPROVEN, some_of(refusals))
    report.proof = "proven safe: no op of the body mixes token rows"


class CompiledForward:
    """Stands for the body's forward while SGLang captures: the first call traces, all later ones run what was made.

    Dynamo's guards are asked at each call of a capture, never while serving, as a replay runs no Python.

    Args:
        forward: the body's own forward.
    """

    def __init__(self, forward: Callable[..., Any], sites: Sites, settings: Settings, report: Report) -> None:
        self.sites, self.settings, self.report = sites, settings, report
        self._failed: list[NotCompiled] = []

        def body(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # One symbol for both, before any size is made of them.
            torch._check(args[1].shape[-1] == args[0].shape[0])
            return without_empty_list(forward(*args, **kwargs))

        self._traced = torch.compile(body, backend=self._backend, fullgraph=True, dynamic=False)

    def _backend(self, gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        try:
            if self.report.compiles >= MOST_TRACES:
                raise NotCompiled(Reason.NOT_TRACED, f"the body was traced {MOST_TRACES} times and asks for more")
            program = build(gm, examples, self.sites, self.settings, self.report)
        except TraceAgain:
            raise
        except NotCompiled as error:
            self._failed.append(error)
            raise
        finally:
            self.report.compile_seconds += time.perf_counter() - start
        self.report.compiles += 1
        return program

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, unbacked: bool) -> Any:
        """One call of the body.

        Args:
            args: token ids ``[T]``, positions ``[T]`` or ``[3, T]``, SGLang's batch, and what else SGLang gives.
            unbacked: whether the token count is traced without a value.

        Raises:
            NotCompiled: the call cannot be traced into one graph, or what was traced cannot be compiled.
        """
        marked = tuple(_marked(i, x, unbacked) for i, x in enumerate(args))
        named = {n: _marked(0, x, unbacked) if isinstance(x, Tensor) else x for n, x in kwargs.items()}
        oblivious = symbolic_config.patch(backed_size_oblivious=not unbacked)  # type: ignore[attr-defined]
        limits = torch._dynamo.config.patch(recompile_limit=MOST_TRACES, fail_on_recompile_limit_hit=True)
        with oblivious, limits, torch.no_grad():
            try:
                return self._traced(marked, named)
            except (TorchDynamoException, ConstraintViolationError, NotCompiled) as error:
                if self._failed:
                    raise self._failed.pop() from None
                raise NotCompiled(Reason.NOT_TRACED, first_lines(error, 3)) from None


def _marked(index: int, value: Any, unbacked: bool) -> Any:
    """An alias whose token dim is marked; positions of several kinds have theirs last."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    alias = value.detach()
    dim = value.dim() - 1 if index == 1 else 0
    if unbacked:
        torch._dynamo.decorators.mark_unbacked(alias, dim, shape_id="tokens", hint_override=512)
    else:
        torch._dynamo.mark_dynamic(alias, dim)
    return alias


def without_empty_list(output: Any) -> Any:
    """A body's output without the empty list of further hidden states that Dynamo, but not Python, takes for a full
    one."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], list) and not output[1]:
        return output[0]
    return output


def difference(output: Any, expected: Any) -> str | None:
    """What tells two outputs of a body apart, in words; None where they agree within a compiler's rounding."""
    mine, theirs = list(_leaves(output)), list(_leaves(expected))
    if [t.shape for t in mine] != [t.shape for t in theirs] or type(output) is not type(expected):
        return f"it returns {[tuple(t.shape) for t in mine]}, SGLang {[tuple(t.shape) for t in theirs]}"
    for a, b in zip(mine, theirs, strict=True):
        a, b = a.double(), b.double()
        error = float((a - b).norm() / b.norm().clamp_min(1e-30))
        if bool(b.isfinite().all()) and not error <= MOST_ERROR:
            return f"its output is {error:.2g} away from SGLang's (relative L2; at most {MOST_ERROR:g})"
    return None


# Far above a compiler's rounding in half precision over any depth, far below another computation's result.
MOST_ERROR = 0.2


def _leaves(output: Any) -> Any:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _leaves(item)
