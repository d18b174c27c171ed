"""``fgc.compile``: a module compiled in place, traced once for each form of call, past Dynamo from then on."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph_compile.batch import PrefillBatch, active_batch
from fullgraph_compile.captured import CapturedGraph, check_batch
from fullgraph_compile.dispatch import Decision, FallbackError, Reason, Route
from fullgraph_compile.forms import Forms, ModuleChanged
from fullgraph_compile.fused_weights import FusedWeights
from fullgraph_compile.integrations import body_of, integration_for
from fullgraph_compile.integrations.plain import Bound, NotServed
from fullgraph_compile.interposed import interposed
from fullgraph_compile.options import Options, disabled
from fullgraph_compile.pipeline import expected_decision
from fullgraph_compile.refusals import Refusals
from fullgraph_compile.registry import register, unregister
from fullgraph_compile.report import Report, log
from fullgraph_compile.tracing import Tracer
from fullgraph_compile.variant import is_number
from fullgraph_compile.whole_model import WholeModel, forward_of_class

# An eager call means the same inside a batch of several requests only for these.
_SAME_EAGERLY = frozenset({Reason.EMPTY})


class CompiledBody:
    """The forward of a module that ``fgc.compile`` compiled in place.

    Args:
        module: the module; its ``forward`` is replaced.
        options: what the user chose.
        whole: the model that it is the body of; None = the module itself.
    """

    def __init__(self, module: nn.Module, options: Options, whole: nn.Module | None = None) -> None:
        whole = module if whole is None else whole
        self.module = weakref.ref(module)
        self.options = options
        self.report = Report(name=type(whole).__name__, slots=options.slots)
        self.integration = integration_for(module, whole)
        self.fused = FusedWeights(module) if options.fuse_projections else None
        self.tracer = Tracer(self.integration, options, self.report, self.fused)
        self.forms = Forms(self.module, self.tracer, strict=options.strict)
        self._refusals = Refusals()
        self._lock = threading.RLock()
        self._counts = threading.local()
        # Where the module is the body of a model, the forward of that.
        self.whole = None if whole is module else WholeModel(whole, self)
        self.__signature__ = inspect.signature(module.forward)
        self.names = list(self.__signature__.parameters)
        register(self, [*module.parameters(), *module.buffers()])

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or one that was saved and loaded, is not compiled: its forward is its class's."""
        return forward_of_class, (self.module(),)

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.integration.forward

    @property
    def calls(self) -> int:
        """How often this thread has called the body."""
        return getattr(self._counts, "calls", 0)

    # -- calling -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not torch.compiler.is_compiling(): that is true in every thread while any one compiles.
        if disabled() or torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            return self.forward(*args, **kwargs)
        self._counts.calls = self.calls + 1
        try:
            try:
                return self._served(args, kwargs)
            except ModuleChanged:
                self.integration.forget()
                return self._served(args, kwargs)
        except NotServed as refusal:
            return self._eager(refusal, args, kwargs)

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound, key = self._bind(args, kwargs)
        self.report.device_reads += bound.device_reads
        with self._lock, entered(bound.batch):
            result = self.forms.serve(bound, key)
            try:
                return result if bound.back is None else bound.back(result)
            except NotServed:
                self.report.drop()
                raise

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, ask: bool = True) -> tuple[Bound, Any]:
        """The call in canonical form, and the form's key; all is checked here, before anything changes.

        Args:
            ask: whether small calls of our own may be made, to learn what the module means by a call.
        """
        module = self.module()
        assert module is not None
        if module.training:
            raise NotServed(Reason.TRAINING, "call eval() for graphs")
        given = {**dict(zip(self.names, args, strict=False)), **kwargs} if args else kwargs
        if torch.is_grad_enabled() and self._wants_grad(module, given):
            raise NotServed(Reason.GRAD, "call under torch.no_grad() or torch.inference_mode()")
        if what := interposed():
            raise NotServed(Reason.INTERPOSED, what)
        for name, value in given.items():
            if isinstance(value, Tensor) and type(value) is not Tensor and type(value) is not nn.Parameter:
                raise NotServed(Reason.ARGUMENTS, f"{name} is a {type(value).__name__}")
        self._refusals.check(None, ask=ask)
        if ask:
            self._learn(self.integration.learn, given)
        bound = self.integration.bind(given, active_batch())
        call = bound.call
        dims = self.integration.token_dims(call)
        if not dims:
            raise NotServed(Reason.ARGUMENTS, "no argument is a tensor with a token dim")
        lead = next(iter(dims))
        tokens, device = call[lead].shape[dims[lead]], call[lead].device
        positions = call.get("position_ids")
        if isinstance(positions, Tensor) and "position_ids" not in dims:
            raise ValueError(f"position_ids has shape {tuple(positions.shape)}, but the call has {tokens} tokens")
        if bound.batch is not None:
            check_batch(bound.batch, tokens, device)
        key = self._key(call, dims)
        if tokens and ask and (key not in self.forms.variants or not self.integration.prepared):
            with self._lock:
                self._learn(self.integration.prepare, call)
        return bound, key

    def _learn(self, question: Callable[[dict[str, Any]], None], arguments: dict[str, Any]) -> None:
        """Ask the module what it means by a call, or what its attention means, before it is traced.

        Raises:
            NotServed: it cannot be marked; calls run as the user wrote them.
        """
        if not self.integration.prepared:
            self.forms.check_weights()
        try:
            question(arguments)
        except NotServed as refusal:
            self._refusals.add(None, refusal)
            raise

    @staticmethod
    def _wants_grad(module: nn.Module, given: dict[str, Any]) -> bool:
        return any(isinstance(x, Tensor) and x.requires_grad for x in given.values()) or any(
            p.requires_grad for p in module.parameters()
        )

    def _key(self, call: dict[str, Any], dims: dict[str, int]) -> Any:
        """What a traced graph is for: names, types, constants, and the token dim of each tensor."""
        parts: list[Any] = []
        for name in sorted(call):
            value = call[name]
            if isinstance(value, Tensor):
                shape = list(value.shape)
                if name in self.integration.not_tokens:
                    shape = [-1] * len(shape)
                elif name in dims:
                    shape[dims[name]] = -1
                parts.append((name, value.dtype, value.device, tuple(shape)))
            elif is_number(value):
                parts.append((name, type(value)))
            elif value is None or isinstance(value, (bool, str)):
                parts.append((name, value))
            else:
                raise NotServed(Reason.ARGUMENTS, f"{name} is a {type(value).__name__}")
        device = call[next(iter(dims))].device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return tuple(parts), autocast

    def _eager(self, refusal: NotServed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The original call.  Inside a batch of several requests it would mean something else, so it is an error."""
        self.report.fell_back(refusal.reason, refusal.detail, strict=self.options.strict)
        self._check_eager(refusal)
        return self.forward(*args, **kwargs)

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
        refusal = NotServed(Reason.PASSED_BY, f"{type(self.module()).__name__}.forward")
        self.report.fell_back(refusal.reason, refusal.detail, strict=self.options.strict)
        self._check_eager(refusal)

    # -- asking --------------------------------------------------------------------------------------------------

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        """The decision for one call, without running it."""
        if disabled():
            return Decision(Route.EAGER, None, Reason.DISABLED)
        try:
            bound, key = self._bind(args, kwargs, ask=False)
        except NotServed as refusal:
            return Decision(Route.EAGER, None, refusal.reason)
        call, batch = bound.call, bound.batch
        tokens = self.forms.tokens(call)
        for variant in self.forms.variants.get(key, ()):
            if not isinstance(variant.graph, CapturedGraph):
                return Decision(Route.COMPILED, None, variant.graph.reason)
            if variant.direct and variant.serves(tokens):
                with entered(batch):
                    return variant.graph.runner.decide(variant.graph.batch_of(variant.arguments(call)))
        return expected_decision(self.options, batch or PrefillBatch([tokens], device=next(iter(call.values())).device))

    def graphs(self) -> list[CapturedGraph]:
        """What was traced for graphs so far."""
        return self.forms.graphs()

    def release(self) -> None:
        """Free the graphs; the next call captures again, without compiling."""
        self._refusals.clear()
        self.forms.release()

    def close(self) -> None:
        """Put the module's own forward back and free everything."""
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
