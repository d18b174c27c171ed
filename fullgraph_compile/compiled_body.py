"""``fgc.compile``: a module compiled in place, traced once for each form of call, past Dynamo from then on."""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fullgraph_compile.batch import PrefillBatch, active_batch
from fullgraph_compile.binding import Binder, Form
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.dispatch import NOT_SAFE, Decision, FallbackError, Reason, RequestsMeet, Route
from fullgraph_compile.forms import Forms
from fullgraph_compile.fused_weights import FusedWeights
from fullgraph_compile.integrations import body_of, integration_for
from fullgraph_compile.integrations.plain import Bound, ModuleChanged, NotServed
from fullgraph_compile.options import Options, disabled
from fullgraph_compile.own_forward import code_of
from fullgraph_compile.pipeline import expected_decision
from fullgraph_compile.registry import register, unregister
from fullgraph_compile.report import Report, log
from fullgraph_compile.tracing import Tracer
from fullgraph_compile.whole_model import WholeModel

# An eager call means the same inside a batch of several requests only for these.
_SAME_EAGERLY = frozenset({Reason.EMPTY})


class _Counts(threading.local):
    """Calls of a body by the thread that asks."""

    calls = 0


class CompiledBody:
    """The forward of a module that ``fgc.compile`` compiled in place.

    Args:
        module: the module; its ``forward`` is replaced.
        options: what the user chose.
        whole: the model that it is the body of; None = the module itself.
    """

    # Times that one call is made again because the module had changed.
    MOST_CHANGES = 8

    def __init__(self, module: nn.Module, options: Options, whole: nn.Module | None = None) -> None:
        whole = module if whole is None else whole
        self.module = weakref.ref(module)
        self.options = options
        self.report = Report(name=type(whole).__name__, slots=options.slots)
        self.integration = integration_for(module, whole)
        self.fused = FusedWeights(module) if options.fuse_projections else None
        self.tracer = Tracer(self.integration, options, self.report, self.fused)
        self.forms = Forms(self.module, self.tracer, strict=options.strict)
        self.closed = False
        self._lock = threading.RLock()
        self._counts = _Counts()
        # Where the module is the body of a model, the forward of that.
        self.whole = None if whole is module else WholeModel(whole, self)
        self.__signature__ = inspect.signature(module.forward)
        self.binder = Binder(
            self.module,
            self.integration,
            list(self.__signature__.parameters.values()),
            self.forms.variants.__contains__,
            self.forms.check_weights,
            self._lock,
        )
        register(self, [*module.parameters(), *module.buffers()])

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or one that was saved and loaded, is not compiled."""
        return self.integration.reduced()

    @property
    def __code__(self) -> types.CodeType:
        """``torch.export`` asks a module's forward for it."""
        return code_of(self.forward)

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.integration.forward

    @property
    def calls(self) -> int:
        """How often this thread has called the body."""
        return self._counts.calls

    # -- calling -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Where an outer torch.compile traces the call, Dynamo follows it here: with the first question answered it sees
        # nothing else of ours.  Not is_compiling(): that is true in every thread while any one compiles.
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or disabled():
            return self.integration.call_forward(args, kwargs)
        self._counts.calls += 1
        try:
            return self._served(args, kwargs)
        except NotServed as error:
            refusal = error
        # Out here, so that an error of the caller's own call does not come with a refusal before it.
        return self._eager(refusal, args, kwargs)

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = active_batch()
        try:
            # What was learned of the module must not be forgotten while a call is bound by it.
            with self._lock:
                if self.closed:
                    raise NotServed(Reason.CLOSED)
                # Each change may show in more than one form of the call: one was bound as the module had been, others
                # were traced then.
                for _ in range(self.MOST_CHANGES):
                    try:
                        bound, form, tokens = self.binder.bind(args, kwargs, given)
                        batch = bound.batch
                        self.report.device_reads += bound.device_reads
                        if batch is None or batch is given:
                            # A step in Python less where there is no way back.
                            if bound.back is None:
                                return self.forms.serve(bound, form, tokens)
                            return self._result(bound, form, tokens)
                        with batch:
                            return self._result(bound, form, tokens)
                    except ModuleChanged:
                        self.integration.forget()
                        self.binder.forget()
            raise NotServed(Reason.NOT_LASTING)
        except RequestsMeet as error:
            if given is not None:
                raise
            # The caller's call is one of the model itself, which tells its requests apart by the mask or the positions.
            raise NotServed(Reason.SINGLE_REQUEST, error.why) from None

    def _result(self, bound: Bound, form: Form, tokens: int) -> Any:
        result = self.forms.serve(bound, form, tokens)
        try:
            return result if bound.back is None else bound.back(result)
        except NotServed:
            self.report.drop()
            raise

    def _eager(self, refusal: NotServed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The original call.  Inside a batch of several requests it would mean something else, so it is an error."""
        if self.options.unsafe == "error" and refusal.reason in NOT_SAFE:
            raise FallbackError(f"{self.report.name}: {refusal} (unsafe='error' is set)")
        self._note(refusal)
        self._check_eager(refusal)
        # Another thread's call may be traced meanwhile, for which the module itself is switched.
        with self._lock if self.integration.switches else nullcontext():
            return self.forward(*args, **kwargs)

    def _note(self, refusal: NotServed) -> None:
        # To a body that was closed meanwhile the call is one of the module itself, as the next one is.
        if not self.closed:
            self.report.fell_back(refusal.reason, refusal.detail, strict=self.options.strict)

    def _check_eager(self, refusal: NotServed) -> None:
        batch = active_batch()
        several = batch is not None and batch.requests > 1 and refusal.reason not in _SAME_EAGERLY
        if batch is not None and (several or batch.cache is not None):
            raise FallbackError(f"{self.report.name} cannot be called with {batch!r}: {refusal}")

    def passed_by(self) -> None:
        """The model was called, and did not call this body.

        Raises:
            FallbackError: inside a batch, which the model then knows nothing of; under ``strict``.
        """
        reason = Reason.CLOSED if self.closed else Reason.PASSED_BY
        refusal = NotServed(reason, f"{type(self.module()).__name__}.forward")
        self._note(refusal)
        self._check_eager(refusal)

    # -- asking --------------------------------------------------------------------------------------------------

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        """The decision for one call, without running it."""
        if disabled():
            return Decision(Route.EAGER, None, Reason.DISABLED)
        try:
            bound, form, tokens = self.binder.bind(args, kwargs, active_batch(), ask=False)
        except NotServed as refusal:
            return Decision(Route.EAGER, None, refusal.reason)
        call, batch = bound.call, bound.batch
        for variant in self.forms.variants.get(form, ()):
            if not isinstance(variant.graph, CapturedGraph):
                return Decision(Route.COMPILED, None, variant.graph.reason)
            if variant.direct and variant.graph.serves(tokens):
                if variant.meet and bound.several_padded:
                    return Decision(Route.EAGER, None, Reason.SINGLE_REQUEST)
                with entered(batch):
                    return variant.graph.runner.decide(variant.graph.batch_of(variant.arguments(call)))
        try:
            self.forms.refusals.check(form, ask=False)
        except NotServed as refusal:
            return Decision(Route.EAGER, None, refusal.reason)
        return expected_decision(self.options, batch or PrefillBatch([tokens], device=next(iter(call.values())).device))

    def graphs(self) -> list[CapturedGraph]:
        """What was traced for graphs so far."""
        return self.forms.graphs()

    def release(self) -> None:
        """Free the graphs; the next call captures again, without compiling."""
        with self._lock:
            self.binder.release()
            self.forms.release()

    def close(self) -> None:
        """Put the module's own forward back and free everything."""
        with self._lock:
            self.closed = True
            self.release()
            unregister(self, *self.graphs())
            self.forms.variants.clear()
            if self.fused is not None:
                self.fused.undo()
            if self.whole is not None:
                self.whole.close()
            module = self.module()
            if module is not None and module.__dict__.get("forward") is self:
                del module.__dict__["forward"]
                if getattr(self.forward, "__func__", None) is not type(module).forward:
                    module.forward = self.forward


@contextmanager
def entered(batch: PrefillBatch | None) -> Iterator[None]:
    """Enter a batch unless it is the active one, or there is none."""
    if batch is None or active_batch() is batch:
        yield
    else:
        with batch:
            yield


def compile(module: nn.Module, **options: Any) -> nn.Module:
    """Compile a module in place, so that a prefill call of it replays one CUDA graph.

    Args:
        module: a transformer body, or a whole model with its head.
        options: see ``fgc.Options``.

    Returns:
        The same object.

    Raises:
        TypeError: not a module, or one that went through ``torch.compile``.
        ValueError: an unknown option or a bad value.

    Example:
        >>> body = fgc.compile(model.model, max_tokens=2048, request_slots=16)
    """
    parsed = Options.parse(options)
    if not isinstance(module, nn.Module):
        raise TypeError(f"compile() takes an nn.Module, not {type(module).__name__}")
    if hasattr(module, "_orig_mod"):
        raise TypeError("the module went through torch.compile already; give compile() the module itself")
    for tensor in (*module.parameters(), *module.buffers()):
        parsed.check_device(tensor.device)
        break
    if disabled():
        return module
    body = body_of(module)
    previous = body.__dict__.get("forward")
    if isinstance(previous, CompiledBody):
        log.info("%s: compiled before; compiling it anew", type(module).__name__)
        previous.close()
    compiled = CompiledBody(body, parsed, module)
    body.forward = compiled
    if compiled.whole is not None:
        module.forward = compiled.whole
    return module


def compiled_body(module: Any) -> CompiledBody | None:
    """What ``compile`` put in the place of a module's forward, or of its body's."""
    for part in (module, body_of(module)) if isinstance(module, nn.Module) else ():
        forward = part.__dict__.get("forward")
        if isinstance(forward, CompiledBody):
            return forward
    return None
