"""What was traced for each form of a call, and the call made by it; what there is not is traced."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from fullgraph_compile.batch import no_active_batch
from fullgraph_compile.binding import Form
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.dispatch import Reason, RequestsMeet
from fullgraph_compile.integrations.offloading import moved_weights
from fullgraph_compile.integrations.plain import Bound, ModuleChanged, NotServed
from fullgraph_compile.plain_graph import PlainGraph
from fullgraph_compile.refusals import Refusals
from fullgraph_compile.runner import WeightsChanged
from fullgraph_compile.tracing import Tracer
from fullgraph_compile.variant import Variant


class Forms:
    """Of one module: the variants of each form of call.

    Args:
        module: the module.
        tracer: traces its calls.
        strict: whether a call that replays no graph is an error.
    """

    # Traces of one form of call, for states of the module that come and go.
    MOST_VARIANTS = 8

    def __init__(self, module: weakref.ref[nn.Module], tracer: Tracer, *, strict: bool) -> None:
        self.module = module
        self.tracer = tracer
        self.report = tracer.report
        self.strict = strict
        self.variants: dict[Form, list[Variant]] = {}
        self.refusals = Refusals()
        # Whether what was traced did not hold at some call since the module was learned.
        self._changed = False

    def serve(self, bound: Bound, form: Form, tokens: int) -> Any:
        """Make the call by the first variant that is for it, the last used first; trace one if there is none."""
        call = bound.call
        self.report.begin()
        variants = self.variants.setdefault(form, [])
        for i, variant in enumerate(variants):
            if not variant.graph.serves(tokens):
                continue
            if not variant.direct:
                if variant.functions is not None and not variant.functions.same():
                    continue
                self._check_plain(variant.graph, bound)
                return self.tracer.again(variant, call)
            if variant.given and variant.needs_asking(call) and not self._accepts(variant, call):
                continue
            meet = variant.meet != "" and bound.several_padded
            asked = i > 0 or variant.doubted or meet
            if asked and not (
                self.tracer.stands(variant) or (variant.take_new_weights() and self.tracer.holds(variant))
            ):
                variant.doubted = True
                continue
            if meet:
                raise RequestsMeet(self.report.name, bound.batch, variant.meet)
            try:
                result = variant(call, bound.batch, owned=not bound.copied)
            except WeightsChanged:
                continue
            except RequestsMeet as error:
                variant.meet = error.why
                self.report.drop()
                raise
            # After the launch, so that the questions are hidden behind the device.  What does not hold is dropped.
            stands = asked or self.tracer.stands(variant)
            replaced = not stands and variant.replaced()
            if replaced and variant.take_new_weights() and self.tracer.holds(variant):
                self.report.drop()
                return variant(call, bound.batch, owned=not bound.copied)
            if replaced or not (stands or self.tracer.holds(variant)):
                # Its graphs are freed: states of the module that come and go must not each keep a set.
                variant.graph.release()
                variant.doubted = self._changed = True
                self.report.drop()
                self.report.fell_back(Reason.CHANGED, strict=self.strict)
                continue
            variant.doubted = False
            if i:
                variants.insert(0, variants.pop(i))
            return result
        if not tokens and not self.tracer.integration.op_attention:
            raise NotServed(Reason.EMPTY)
        if len(variants) >= self.MOST_VARIANTS:
            variants[:] = [v for v in variants if v.direct and self.tracer.holds(v)]
        if len(variants) >= self.MOST_VARIANTS:
            raise NotServed(Reason.ARGUMENTS, f"more than {self.MOST_VARIANTS} values of a number that the graph keeps")
        if self._changed:
            self._changed = False
            raise ModuleChanged
        if not bound.several_padded or self.strict:
            _, result = self._trace(call, form)
            return result
        # What was traced may turn out to serve one request only.  A padded batch then runs as it is, so the trace is
        # made by a call for one, which is not counted.
        then = self.report.copy()
        with no_active_batch():
            variant, _ = self._trace(call, form)
        self.report.take_counts(then)
        # What it was about that turned a bucket off stays: no later call finds it out again.
        self.report.details = {**self.report.details, **then.details}
        if not variant.lasting:
            raise NotServed(Reason.NOT_LASTING)
        return self.serve(bound, form, tokens)

    def _trace(self, call: dict[str, Any], form: Form) -> tuple[Variant, Any]:
        """Trace this form of the call, and make the call; what is for the calls that follow is kept.

        Raises:
            NotServed: it cannot be traced, or could not be some calls ago: it is not tried each time.
        """
        self.refusals.check(form)
        self.check_weights()
        module = self.module()
        assert module is not None
        try:
            variant, result = self.tracer.trace(module, call)
        except NotServed as refusal:
            self.refusals.add(form, refusal)
            raise
        if variant.lasting:
            self.refusals.drop(form)
            self.variants.setdefault(form, []).insert(0, variant)
        else:
            self.refusals.add(form, NotServed(Reason.NOT_LASTING))
        return variant, result

    def check_weights(self) -> None:
        """Raise ``NotServed`` where the weights do not stay on one device."""
        module = self.module()
        assert module is not None
        if moved := moved_weights(module):
            raise NotServed(Reason.OFFLOADED, moved)

    @staticmethod
    def _check_plain(graph: Any, bound: Bound) -> None:
        """A padded batch needs no packing where no graph replays it: its own mask tells the requests apart.

        Raises:
            NotServed: so it is.
        """
        if bound.padded and isinstance(graph, PlainGraph) and not graph.separates():
            raise NotServed(graph.reason, graph.detail)

    def _accepts(self, variant: Variant, call: dict[str, Any]) -> bool:
        with self.tracer.modes():
            return variant.accepts(call)

    def graphs(self) -> list[CapturedGraph]:
        """What was traced for graphs so far."""
        return [v.graph for vs in list(self.variants.values()) for v in list(vs) if isinstance(v.graph, CapturedGraph)]

    def release(self) -> None:
        """Free the graphs, and try again what was refused."""
        self.refusals.clear()
        for graph in self.graphs():
            graph.runner.release()
