"""``fgc.compile``: a module compiled in place, traced once for each form of call, past Dynamo from then on."""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from fullgraph_compile.backend import compile_graph
from fullgraph_compile.batch import PrefillBatch, active_batch
from fullgraph_compile.captured import CapturedGraph, check_batch, restarts
from fullgraph_compile.dispatch import Decision, FallbackError, Reason, Route
from fullgraph_compile.integrations import integration_for
from fullgraph_compile.integrations.plain import NotServed
from fullgraph_compile.options import BadOption, Options, disabled
from fullgraph_compile.pipeline import expected_decision
from fullgraph_compile.registry import register, unregister
from fullgraph_compile.report import Report, log
from fullgraph_compile.runner import WeightsChanged
from fullgraph_compile.variant import Variant, attributes, is_number, keep_guard, left_something, thin

# An eager call means the same inside a batch of several requests only for these.
_SAME_EAGERLY = frozenset({Reason.EMPTY})


class CompiledBody:
    """The forward of a module that ``fgc.compile`` compiled in place.

    Args:
        module: the module; its ``forward`` is replaced.
        options: what the user chose.
    """

    # Traces of one form of call, for states of the module that come and go.
    MOST_VARIANTS = 8

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.module = weakref.ref(module)
        self.forward = module.forward
        self.options = options
        self.report = Report(name=type(module).__name__, slots=options.slots)
        self.integration = integration_for(module)
        self.refused: NotServed | None = None
        self._prepared = False
        self._variants: dict[Any, list[Variant]] = {}
        self._lock = threading.RLock()
        self.__signature__ = inspect.signature(module.forward)
        self._names = list(self.__signature__.parameters)
        register(self, [*module.parameters(), *module.buffers()])

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or one that was saved and loaded, is not compiled: its forward is its class's."""
        return _forward_of_class, (self.module(),)

    # -- calling -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if disabled() or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        try:
            call, key, batch = self._bind(args, kwargs)
            with self._lock, entered(batch):
                return self._serve(call, key)
        except NotServed as refusal:
            return self._eager(refusal, args, kwargs)

    def _serve(self, call: dict[str, Any], key: Any) -> Any:
        """Make the call by the first variant that is for it, the last used first; trace one if there is none."""
        variants = self._variants.setdefault(key, [])
        tokens = self._tokens(call)
        for i, variant in enumerate(variants):
            if not variant.serves(tokens):
                continue
            if not variant.direct:
                with self._modes():
                    return variant.traced(self.module(), self._marked(call, unbacked=variant.unbacked))
            if variant.needs_asking(call) and not self._accepts(variant, call):
                continue
            if i and not (variant.take_new_weights() and self._holds(variant)):
                continue
            try:
                with torch.no_grad():
                    result = variant(call)
            except WeightsChanged:
                continue
            # After the launch, so that the questions are hidden behind the device.  What does not hold is dropped.
            replaced = i == 0 and variant.replaced()
            if replaced and variant.take_new_weights() and self._holds(variant):
                with torch.no_grad():
                    return variant(call)
            if replaced or (i == 0 and not self._holds(variant)):
                # Its graphs are freed: states of the module that come and go must not each keep a set.
                variant.graph.release()
                self.report.fell_back(Reason.CHANGED, strict=self.options.strict)
                continue
            variants.insert(0, variants.pop(i))
            return result
        if not tokens and not self.integration.op_attention:
            raise NotServed(Reason.EMPTY)
        if len(variants) >= self.MOST_VARIANTS:
            variants[:] = [v for v in variants if v.direct and self._holds(v)]
        if len(variants) >= self.MOST_VARIANTS:
            raise NotServed(Reason.ARGUMENTS, f"more than {self.MOST_VARIANTS} values of a number that the graph keeps")
        variant, result = self._trace(call)
        variants.insert(0, variant)
        return result

    def _holds(self, variant: Variant) -> bool:
        with self._modes():
            return variant.holds()

    def _accepts(self, variant: Variant, call: dict[str, Any]) -> bool:
        with self._modes():
            return variant.accepts(call)

    def _tokens(self, call: dict[str, Any]) -> int:
        name, dim = next(iter(self.integration.token_dims(call).items()))
        return call[name].shape[dim]

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, prepare: bool = True
    ) -> tuple[dict[str, Any], Any, PrefillBatch | None]:
        """The call in canonical form, the form's key, and the batch; all is checked here, before anything changes."""
        module = self.module()
        assert module is not None
        if module.training:
            raise NotServed(Reason.TRAINING, "call eval() for graphs")
        given = {**dict(zip(self._names, args, strict=False)), **kwargs} if args else kwargs
        if torch.is_grad_enabled() and self._wants_grad(module, given):
            raise NotServed(Reason.GRAD, "call under torch.no_grad() or torch.inference_mode()")
        if self.refused is not None:
            raise self.refused
        active = active_batch()
        call = self.integration.canonical(given, active)
        dims = self.integration.token_dims(call)
        if not dims:
            raise NotServed(Reason.ARGUMENTS, "no argument is a tensor with a token dim")
        lead = next(iter(dims))
        tokens, device = call[lead].shape[dims[lead]], call[lead].device
        positions = given.get("position_ids")
        if isinstance(positions, Tensor) and "position_ids" not in dims:
            raise ValueError(f"position_ids has shape {tuple(positions.shape)}, but the call has {tokens} tokens")
        if active is not None:
            check_batch(active, tokens, device)
        if tokens and prepare:
            self._prepare(call)
        return call, self._key(call, dims), active or self._derived(positions, tokens, device)

    def _prepare(self, call: dict[str, Any]) -> None:
        """Once, before the first call is traced: learn what the module's attention means.

        Raises:
            NotServed: it cannot be marked; every later call runs as the user wrote it.
        """
        if self._prepared:
            return
        with self._lock:
            try:
                self.integration.prepare(call)
            except NotServed as refusal:
                self.refused = refusal
                raise
            self._prepared = True

    def _derived(self, positions: Any, tokens: int, device: torch.device) -> PrefillBatch | None:
        """What a call without a batch is for; None leaves it to the masks of the traced graph."""
        if not self.integration.op_attention:
            return None
        told = isinstance(positions, Tensor) and positions.dim() <= 2 and tokens
        if not told or not self.integration.restarts_are_requests:
            return PrefillBatch([tokens], device=device)
        self.report.device_reads += positions.device.type != "cpu"
        return PrefillBatch(restarts(positions), device=device)

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
        batch = active_batch()
        if batch is not None and batch.requests > 1 and refusal.reason not in _SAME_EAGERLY:
            raise FallbackError(f"{self.report.name} cannot be called with {batch!r}: {refusal}")
        return self.forward(*args, **kwargs)

    # -- tracing -------------------------------------------------------------------------------------------------

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """What a trace is made under: the op as the module's attention, and no gradients, whatever the caller has."""
        with self.integration.attention(), torch.inference_mode(False), torch.no_grad():
            yield

    def _trace(self, call: dict[str, Any]) -> tuple[Variant, Any]:
        """Trace this form of the call, compile it, and answer the call itself.

        An unbacked token count gives one trace for every size, where the module's code allows it.  Where it asks
        something of the count, a backed one that is told nothing of its size may still give one.
        """
        refusal: NotServed | None = None
        for unbacked in (True, False) if self.integration.op_attention else (False,):
            try:
                return self._trace_once(call, unbacked=unbacked)
            except NotServed as error:
                if error.reason is not Reason.NOT_TRACED:
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _trace_once(self, call: dict[str, Any], *, unbacked: bool) -> tuple[Variant, Any]:
        seen: list[Any] = []
        outputs: list[Any] = []
        failed: list[BadOption] = []

        def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            try:
                graph = compile_graph(gm, examples, self.options, self.report)
            except BadOption as error:
                failed.append(error)
                raise
            if isinstance(graph, CapturedGraph):
                graph.as_traced = None  # this body traces anew

            def run(*args: Any) -> Any:
                results = graph(*args)
                if not seen:
                    seen.extend((graph, args))
                    outputs.extend(results)
                return results

            return run

        module = self.module()
        assert module is not None
        marked = self._marked(call, unbacked=unbacked)
        body = thin(self.forward)
        traced = torch.compile(
            body, backend=backend, fullgraph=True, dynamic=False, options={"guard_filter_fn": keep_guard}
        )
        before = attributes(module)
        oblivious = symbolic_config.patch(backed_size_oblivious=not unbacked)  # type: ignore[attr-defined]
        hooks = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        with self._modes(), oblivious, hooks:
            try:
                result = traced(module, marked)
            except (TorchDynamoException, ConstraintViolationError) as error:
                if failed:
                    raise failed[0] from None
                raise NotServed(Reason.NOT_TRACED, _first_lines(error)) from None
        if not seen:
            raise NotServed(Reason.NOT_TRACED, "nothing was traced")
        variant = Variant(seen[0], traced, body.__code__, marked, unbacked, self.module)
        if not left_something(before):
            variant.learn(seen[1], outputs, result)
        if variant.direct and not self._holds(variant):
            variant.direct = False
        return variant, result

    def _marked(self, call: dict[str, Any], *, unbacked: bool) -> dict[str, Any]:
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

    # -- asking --------------------------------------------------------------------------------------------------

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        """The decision for one call, without running it."""
        if disabled():
            return Decision(Route.EAGER, None, Reason.DISABLED)
        try:
            call, key, batch = self._bind(args, kwargs, prepare=False)
        except NotServed as refusal:
            return Decision(Route.EAGER, None, refusal.reason)
        tokens = self._tokens(call)
        for variant in self._variants.get(key, ()):
            if not isinstance(variant.graph, CapturedGraph):
                return Decision(Route.COMPILED, None, variant.graph.reason)
            if variant.direct and variant.serves(tokens):
                with entered(batch):
                    return variant.graph.runner.decide(variant.graph.batch_of(variant.arguments(call)))
        return expected_decision(self.options, batch or PrefillBatch([tokens], device=next(iter(call.values())).device))

    def graphs(self) -> list[CapturedGraph]:
        """What was traced for graphs so far."""
        return [v.graph for vs in self._variants.values() for v in vs if isinstance(v.graph, CapturedGraph)]

    def release(self) -> None:
        """Free the graphs; the next call captures again, without compiling."""
        for graph in self.graphs():
            graph.runner.release()

    def close(self) -> None:
        """Put the module's own forward back and free everything."""
        self.release()
        unregister(self, *self.graphs())
        self._variants.clear()
        module = self.module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
            if getattr(self.forward, "__func__", None) is not type(module).forward:
                module.forward = self.forward


def _forward_of_class(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


@contextmanager
def entered(batch: PrefillBatch | None) -> Iterator[None]:
    """Enter a batch unless it is the active one, or there is none."""
    if batch is None or active_batch() is batch:
        yield
    else:
        with batch:
            yield


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


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
    previous = module.__dict__.get("forward")
    if isinstance(previous, CompiledBody):
        log.info("%s: compiled before; compiling it anew", type(module).__name__)
        previous.close()
    module.forward = CompiledBody(module, parsed)
    return module
