"""One form of a call traced, for any token count, and answered."""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from fullgraph_compile.backend import compile_graph
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.class_functions import ClassFunctions, traced_code
from fullgraph_compile.compilers import warm_workers
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.fused_weights import FusedWeights
from fullgraph_compile.graphs.base import collector_off
from fullgraph_compile.integrations.plain import NotServed, PlainModule, device_of
from fullgraph_compile.options import BadOption, Options
from fullgraph_compile.plain_graph import PlainGraph
from fullgraph_compile.progress import phase
from fullgraph_compile.report import Report, first_lines
from fullgraph_compile.traceable import (
    Written,
    attributes,
    keep_guard,
    left_something,
    thin,
    written_attributes,
)
from fullgraph_compile.variant import Variant
from fullgraph_compile.watching import WORKS

# Hooks of submodules are looked at; and Dynamo's own shortcut past them, which newer versions have turned off as it
# reads freed memory, is not taken: ``StandingGuards`` is in its place.
_GUARDS = {"skip_nnmodule_hook_guards": False}
if WORKS and hasattr(torch._dynamo.config, "use_recursive_dict_tags_for_guards"):
    _GUARDS["use_recursive_dict_tags_for_guards"] = False
# That two objects are one is asked by a guard that can be split, not by a line in Python.
if hasattr(torch._dynamo.config, "use_lamba_guard_for_object_aliasing"):
    _GUARDS["use_lamba_guard_for_object_aliasing"] = False


@dataclass
class _First:
    """What is seen of the first call of a trace.

    Attributes:
        graph: what the backend made.
        args: what that was called with.
        results: what it returned.
        failed: what the backend raised.
        codes: what was traced through.
        written: what it writes to objects that were there before it; None = more than attributes.
        ran: whether there was such a call.
    """

    graph: Any = None
    args: Sequence[Any] = ()
    results: Sequence[Any] = ()
    failed: BadOption | NotServed | None = None
    codes: set[types.CodeType] = field(default_factory=set)
    written: list[Written] | None = None
    ran: bool = False

    def clear(self) -> None:
        """Let go of all; there was a first call."""
        self.graph, self.args, self.results, self.failed, self.codes, self.ran = None, (), (), None, set(), True
        self.written = None


@contextmanager
def untold() -> Iterator[None]:
    """Within it torch does not print what it raises as well where a guard cannot be made: the report has the reason."""
    logger = logging.getLogger("torch._guards")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Graphs(list[Any]):
    """What the backend made for one trace.  Its variant holds them; Dynamo, which keeps a trace for good, does not."""


class Tracer:
    """Traces calls of one module.

    Args:
        integration: what knows the module.
        options: what the user chose.
        report: compiles are counted there.
        fused: joins the weights of linears that read the same input; None = they stay apart.
    """

    def __init__(
        self, integration: PlainModule, options: Options, report: Report, fused: FusedWeights | None = None
    ) -> None:
        self.integration = integration
        self.options = options
        self.report = report
        self.fused = fused

    @contextmanager
    def modes(self) -> Iterator[None]:
        """What a trace is made under: the op as the module's attention, and no gradients, whatever the caller has."""
        with self.integration.attention(), torch.inference_mode(False), torch.no_grad():
            yield

    def trace(self, module: nn.Module, call: dict[str, Any]) -> tuple[Variant, Any]:
        """Trace this form of the call, compile it, and answer the call itself.

        An unbacked token count gives one trace for every size, where the module's code allows it.  Where it asks
        something of the count, a backed one that is told nothing of its size may still give one.

        Raises:
            NotServed: neither traces.
        """
        refusal: NotServed | None = None
        tiers = ((True, False), (False, True)) if self.integration.op_attention else ((False, True), (False, False))
        for unbacked, oblivious in tiers:
            try:
                variant, result = self._trace(module, call, unbacked=unbacked, oblivious=oblivious)
                self._check(variant, call)
                return variant, result
            except NotServed as error:
                if error.reason is not Reason.NOT_TRACED:
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _check(self, variant: Variant, call: dict[str, Any]) -> None:
        """Let the module compare the trace with itself; these calls are not counted."""

        own = self.integration.all_or_nothing and not self.integration.op_attention
        if own and variant.direct and isinstance(variant.graph, CapturedGraph):
            then = self.report.copy()
            # Past Dynamo, which would compile anew for a call in which something besides the tokens differs.
            self.integration.check_trace(call, variant)
            if variant.graph.serves_one and self.integration.check_trace(call, variant, (1,), strict=False):
                variant.graph.serve_one_token()
            self.report.take_counts(then)

    def _trace(
        self, module: nn.Module, call: dict[str, Any], *, unbacked: bool, oblivious: bool
    ) -> tuple[Variant, Any]:
        # Dynamo keeps the backend for good; what that holds would be kept with it, up to the weights.
        first = _First()
        try:
            return self._trace_into(first, module, call, unbacked=unbacked, oblivious=oblivious)
        finally:
            first.clear()

    def _trace_into(
        self, first: _First, module: nn.Module, call: dict[str, Any], *, unbacked: bool, oblivious: bool
    ) -> tuple[Variant, Any]:
        shown = ExitStack()
        graphs = _Graphs()
        me, made = weakref.ref(self), weakref.ref(graphs)

        def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            first.codes.update(traced_code())
            first.written = written_attributes()
            shown.close()  # what follows shows itself
            tracer = me()
            assert tracer is not None
            integration = tracer.integration
            try:
                graph = compile_graph(gm, examples, tracer.options, tracer.report, tracer.fused)
            except BadOption as error:
                first.failed = error
                raise
            if isinstance(graph, CapturedGraph):
                graph.as_traced = None  # this body traces anew
                if integration.one_request:
                    graph.serve_one_request()
            if integration.all_or_nothing and (refusal := _not_captured(graph)) is not None:
                first.failed = refusal
                raise refusal

            kept = made()
            assert kept is not None
            at = len(kept)
            kept.append(graph)

            def run(*args: Any) -> Any:
                due, first.ran = not first.ran, True
                kept = made()
                assert kept is not None
                results = kept[at](*args)
                if due:
                    first.graph, first.args, first.results = kept[at], args, results
                return results

            return run

        marked = self.marked(call, unbacked=unbacked)
        body = thin(self.integration.traceable())
        traced = torch.compile(
            body, backend=backend, fullgraph=True, dynamic=False, options={"guard_filter_fn": keep_guard}
        )
        before = attributes(module)
        warm_workers(self.options.compiler, device_of(call))
        sizes = symbolic_config.patch(backed_size_oblivious=oblivious)  # type: ignore[attr-defined]
        # A trace makes objects by the million, and hardly any garbage: collecting would take a fifth of its time.
        quiet = collector_off(collect=False)
        with self.modes(), sizes, torch._dynamo.config.patch(_GUARDS), quiet, untold(), shown:
            shown.enter_context(phase("tracing", show=self.options.show_progress))
            try:
                result = traced(module, marked)
            except (TorchDynamoException, ConstraintViolationError) as error:
                if first.failed is not None:
                    raise first.failed from None
                raise NotServed(Reason.NOT_TRACED, first_lines(error, 2)) from None
            except Exception as error:
                # Before anything was computed it is the trace's own, or the module's, which then raises it again.
                if first.ran:
                    raise
                raise NotServed(Reason.NOT_TRACED, first_lines(error, 2)) from error
        if first.graph is None:
            raise NotServed(Reason.NOT_TRACED, "nothing was traced")
        variant = Variant(first.graph, traced, body.__code__, marked, unbacked, weakref.ref(module))
        variant.graphs = graphs
        variant.functions = ClassFunctions(module, first.codes)
        if not left_something(before):
            variant.lasting = self.holds(variant)
            # Only Dynamo's own code writes what else the call leaves.
            if variant.lasting and first.written is not None and all(w.put_back for w in first.written):
                variant.learn(first.args, first.results, result)
                variant.written = first.written
        if variant.direct:
            variant.stand(body.__globals__, self.integration)
            if not self.stands(variant):
                variant.standing = None
        return variant, result

    def stands(self, variant: Variant) -> bool:
        """Whether the module and its weights are known to be as they were when all was last asked.

        If not, ``replaced`` and ``holds`` tell.
        """
        if not variant.stands():
            variant.changed()
            return False
        if variant.in_any_mode and not torch.is_grad_enabled() and variant.still_holds():
            return True
        with self.modes():
            return variant.still_holds()

    def again(self, variant: Variant, call: dict[str, Any]) -> Any:
        """A call through Dynamo.

        Raises:
            NotServed: what was traced does not hold any more, and it cannot be traced again.
        """
        with self.modes():
            try:
                return variant.traced(variant.module(), self.marked(call, unbacked=variant.unbacked))
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                raise NotServed(Reason.NOT_TRACED, first_lines(error, 2)) from None

    def holds(self, variant: Variant) -> bool:
        """Whether the module is as it was when the variant was traced."""
        with self.modes():
            return variant.holds()

    def marked(self, call: dict[str, Any], *, unbacked: bool) -> dict[str, Any]:
        """The call on aliases of its tensors whose token dims are marked; a mark on the caller's own tensor would
        leak into other compiles."""
        marked = dict(call)
        for name, dim in self.integration.token_dims(call).items():
            marked[name] = alias = call[name].detach()
            if unbacked:
                hint = min(512, self.options.max_tokens)
                torch._dynamo.decorators.mark_unbacked(alias, dim, shape_id="tokens", hint_override=hint)
            else:
                torch._dynamo.mark_dynamic(alias, dim)
        for name in self.integration.not_tokens:
            if isinstance(call.get(name), Tensor):
                marked[name] = alias = call[name].detach()
                for dim in range(alias.dim()):
                    torch._dynamo.decorators.mark_unbacked(alias, dim)
        return marked


def _not_captured(graph: Any) -> NotServed | None:
    """Why a traced graph replays nothing, if it is for what it computes."""
    if isinstance(graph, CapturedGraph):
        blocked = graph.runner.limits.blocked
        if graph.tail_mixes:
            return NotServed(Reason.UNPROVEN, graph.tail_mixes)
        return NotServed(blocked, graph.detail) if blocked is Reason.UNPROVEN else None
    return NotServed(graph.reason, graph.detail) if isinstance(graph, PlainGraph) else None
