"""The ``torch.compile`` backend that Dynamo calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fullgraph_compile.assembly import Refused
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.compilers import TraceAgain, compile_piece, warm_workers
from fullgraph_compile.dispatch import NOT_SAFE, Reason
from fullgraph_compile.fixed_size import separates
from fullgraph_compile.fused_weights import FusedWeights
from fullgraph_compile.options import BadOption, Options, disabled
from fullgraph_compile.passes.autocast_regions import forward_of
from fullgraph_compile.passes.common import copy_graph, is_weight, placeholders, source_line
from fullgraph_compile.pipeline import build
from fullgraph_compile.plain_graph import PlainGraph
from fullgraph_compile.registry import register
from fullgraph_compile.report import Report, log


class FullPrefill:
    """``torch.compile(module, backend="full_prefill", options={...})``.

    One object for all uses, so that Dynamo sees the same backend each time and does not compile anew for it.

    Example:
        >>> body = torch.compile(model.model, backend="full_prefill", options={"max_tokens": 2048})
    """

    __name__ = "full_prefill"

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph.

        Args:
            gm: Dynamo's graph; it is not changed.
            example_inputs: its inputs: tensors, and SymInts for sizes.
            options: keys of ``fgc.Options``.
            mode: a mode of ``torch.compile``; this backend has none.

        Raises:
            ValueError: an unknown option or a bad value, naming the valid ones.
        """
        if mode not in (None, "default"):
            raise ValueError(f"mode={mode!r}: the full_prefill backend has no modes; use options={{...}}")
        return compile_graph(gm, example_inputs, Options.parse(options))

    def reset(self) -> None:
        """Called by ``torch.compiler.reset()``; graphs are freed with the code that Dynamo drops."""


full_prefill = FullPrefill()


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report | None = None,
    fused: FusedWeights | None = None,
) -> Callable[..., Any]:
    """What runs in place of a traced graph.

    Never raises to refuse, as Dynamo would make a graph break of it: what cannot be captured runs as it is, and
    each call counts the reason.
    """
    if disabled():
        return forward_of(gm)
    report = report or Report(name=_name_of(gm))
    report.slots = options.slots
    report.compiles += 1
    start = time.perf_counter()
    weights = [x for n, x in zip(placeholders(gm), example_inputs, strict=True) if is_weight(n, x)]
    for tensor in (x for x in (*weights, *example_inputs) if isinstance(x, Tensor) and x.dim()):
        options.check_device(tensor.device)
        warm_workers(options.compiler, tensor.device)
        break
    compiled: Any
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs):
        compiled = PlainGraph(forward_of(gm), report, Reason.GRAD, separates=separates(gm), strict=options.strict)
    else:
        try:
            compiled = build(gm, example_inputs, options, report, fused)
            if isinstance(compiled, CapturedGraph):
                compiled.as_traced = PlainGraph(
                    forward_of(gm), report, Reason.WEIGHTS_MOVED, separates=separates(gm), strict=options.strict
                )
        except (TraceAgain, BadOption):
            raise
        except Refused as refused:
            compiled = _as_it_is(gm, example_inputs, options, report, refused)
        except Exception as error:
            log.exception("%s: the graph runs as it was traced", report.name)
            detail = f"{type(error).__name__}: {error}"
            compiled = PlainGraph(
                forward_of(gm), report, Reason.NOT_COMPILED, detail, separates=separates(gm), strict=options.strict
            )
    report.compile_seconds += time.perf_counter() - start
    register(compiled, weights)
    return compiled


def _as_it_is(
    gm: GraphModule, examples: Sequence[Any], options: Options, report: Report, refused: Refused
) -> PlainGraph:
    """The traced graph as a whole, compiled at exact sizes, with the model's own attention."""
    report.ready = True
    report.proof = report.proof or f"not looked at: {refused.reason.value}"
    unsafe = options.unsafe == "error" and refused.reason in NOT_SAFE
    call: Callable[..., Any] = forward_of(gm)
    if not unsafe:
        try:
            call = compile_piece(copy_graph(gm), examples, options.compiler, captured=False)
        except TraceAgain:
            raise
        except Exception as error:
            log.warning("%s: %s refused the graph, it runs as traced: %s", report.name, options.compiler, error)
    return PlainGraph(
        call, report, refused.reason, refused.detail, separates=separates(gm), strict=options.strict, error=unsafe
    )


def _name_of(gm: GraphModule) -> str:
    """The file that most of the graph comes from: Dynamo does not say which module it traced."""
    files = Counter(source_line(n).partition(":")[0] for n in gm.graph.nodes if n.op.startswith("call"))
    files.pop("", None)
    return Path(files.most_common(1)[0][0]).name if files else "graph"
