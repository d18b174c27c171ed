"""``fgc.compile``: a module compiled in place, traced once for each form of call, past Dynamo from then on."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils import _pytree as pytree

from fullgraph_compile.backend import compile_graph
from fullgraph_compile.batch import PrefillBatch, active_batch
from fullgraph_compile.captured import CapturedGraph, check_batch, restarts
from fullgraph_compile.dispatch import Decision, FallbackError, Reason, Route
from fullgraph_compile.integrations import integration_for
from fullgraph_compile.integrations.plain import NotServed
from fullgraph_compile.options import Options, disabled
from fullgraph_compile.pipeline import expected_decision
from fullgraph_compile.registry import register
from fullgraph_compile.report import Report, log


class _Owner(NamedTuple):
    """Where a weight hangs in the module, so that a replaced one is seen."""

    slots: dict[str, Any]
    name: str
    tensor: Tensor


@dataclass
class _Variant:
    """One traced form of the call: which arguments are given, their types and their constants.

    Attributes:
        graph: what the backend made of it.
        traced: the call through Dynamo, for results that cannot be rebuilt without it.
        args: a value for each placeholder; those of ``sizes`` and ``names`` are filled in at each call.
        sizes: placeholders that are the token count.
        names: placeholder -> name of the call argument.
        owners: where each weight hangs.
        template: for each leaf of the result, the index of an output, or the constant itself.
    """

    graph: Any
    traced: Callable[..., Any]
    direct: bool = False
    args: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    owners: list[_Owner] = field(default_factory=list)
    template: list[tuple[str, Any]] = field(default_factory=list)
    spec: Any = None

    def arguments(self, call: dict[str, Any]) -> list[Any]:
        """What the graph takes, for a call of this form."""
        args = self.args.copy()
        for i, name in self.names.items():
            args[i] = call[name]
        index, dim = self.graph.token_input
        for i in self.sizes:
            args[i] = args[index].shape[dim]
        return args

    def moved(self) -> bool:
        """Whether a weight was replaced in the module since the trace."""
        slots, names, tensors = zip(*self.owners, strict=True) if self.owners else ((), (), ())
        return not all(map(operator.is_, map(dict.get, slots, names), tensors))


class CompiledBody:
    """The forward of a module that ``fgc.compile`` compiled in place.

    Args:
        module: the module; its ``forward`` is replaced.
        options: what the user chose.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.module = weakref.ref(module)
        self.forward = module.forward
        self.options = options
        self.report = Report(name=type(module).__name__, slots=options.slots)
        self.integration = integration_for(module)
        self.refused: NotServed | None = None
        self._prepared = False
        self._variants: dict[Any, _Variant] = {}
        self._lock = threading.RLock()
        self._names = list(inspect.signature(module.forward).parameters)
        register(self, [*module.parameters(), *module.buffers()])

    # -- calling -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if disabled() or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        try:
            call, key, batch = self._bind(args, kwargs)
        except NotServed as refusal:
            return self._eager(refusal, args, kwargs)
        with self._lock, entered(batch):
            variant = self._variants.get(key)
            if variant is None:
                try:
                    return self._trace(key, call)
                except NotServed as refusal:
                    return self._eager(refusal, args, kwargs)
            if not variant.direct:
                with self.integration.attention(), torch.no_grad():
                    return variant.traced(**self._marked(call))
            return self._direct(key, variant, call)

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
        if positions is not None and "position_ids" not in dims:
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

    def _derived(self, positions: Tensor | None, tokens: int, device: torch.device) -> PrefillBatch | None:
        """What a call without a batch is for; None leaves it to the masks of the traced graph."""
        if not self.integration.unbacked:
            return None
        if positions is None or positions.dim() > 2 or not tokens or not self.integration.restarts_are_requests:
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
            elif value is None or isinstance(value, (bool, int, float, str)):
                parts.append((name, type(value), value))
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

    def _trace(self, key: Any, call: dict[str, Any]) -> Any:
        """Trace this form of the call, compile it, and answer the call itself."""
        seen: list[Any] = []
        outs: list[Any] = []

        def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            graph = compile_graph(gm, examples, self.options, self.report)

            def run(*args: Any) -> Any:
                results = graph(*args)
                if not seen:
                    seen.extend((graph, args))
                    outs.extend(results)
                return results

            return run

        marked = self._marked(call)
        traced = torch.compile(_thin(self.forward), backend=backend, fullgraph=True, dynamic=False)
        with self.integration.attention(), torch.inference_mode(False), torch.no_grad():
            try:
                result = traced(**marked)
            except (TorchDynamoException, ConstraintViolationError) as error:
                raise NotServed(Reason.NOT_TRACED, _first_line(error)) from None
        if not seen:
            raise NotServed(Reason.NOT_TRACED, "nothing was traced")
        self._variants[key] = self._variant(seen[0], seen[1], outs, traced, marked, result)
        return result

    def _marked(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call on aliases of its tensors whose token dims are marked; a mark on the caller's own tensor would
        leak into other compiles."""
        dims = self.integration.token_dims(call)
        marked = dict(call)
        for name, dim in dims.items():
            alias = call[name].detach()
            if self.integration.unbacked:
                torch._dynamo.decorators.mark_unbacked(
                    alias, dim, shape_id="tokens", hint_override=min(512, self.options.max_tokens)
                )
            else:
                torch._dynamo.mark_dynamic(alias, dim)
            marked[name] = alias
        for name in self.integration.not_tokens:
            if isinstance(call.get(name), Tensor):
                marked[name] = call[name].detach()
                for dim in range(marked[name].dim()):
                    torch._dynamo.decorators.mark_unbacked(marked[name], dim)
        return marked

    def _variant(
        self,
        graph: Any,
        args: Sequence[Any],
        outs: list[Any],
        traced: Callable[..., Any],
        call: dict[str, Any],
        result: Any,
    ) -> _Variant:
        """Learn how to call the graph, and how to rebuild its result, without Dynamo."""
        variant = _Variant(graph, traced)
        module = self.module()
        assert module is not None
        if not isinstance(graph, CapturedGraph):
            return variant
        names = {id(v): k for k, v in call.items() if isinstance(v, Tensor)}
        owners = {id(t): _Owner(slots, name, t) for slots, name, t in _weights(module)}
        sizes = set(graph.runner.inputs.sizes)
        for i, arg in enumerate(args):
            variant.args.append(None)
            if i in sizes or not isinstance(arg, Tensor):
                variant.sizes.append(i)
            elif id(arg) in names:
                variant.names[i] = names[id(arg)]
            elif id(arg) in owners:
                variant.owners.append(owners[id(arg)])
                variant.args[i] = arg
            else:
                return variant
        leaves, spec = pytree.tree_flatten(result)
        at = {id(t): i for i, t in enumerate(outs) if isinstance(t, Tensor)}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) in at:
                variant.template.append(("output", at[id(leaf)]))
            elif isinstance(leaf, Tensor) and id(leaf) in names:
                variant.template.append(("input", names[id(leaf)]))
            elif leaf is None or isinstance(leaf, (bool, str)):
                variant.template.append(("constant", leaf))
            else:
                return variant
        variant.spec = spec
        variant.direct = True
        return variant

    # -- the hot path --------------------------------------------------------------------------------------------

    def _direct(self, key: Any, variant: _Variant, call: dict[str, Any]) -> Any:
        graph: CapturedGraph = variant.graph
        args = variant.arguments(call)
        with torch.no_grad():
            outs = graph(*args)
        # After the launch, so that the comparison is hidden behind the device.
        if variant.moved():
            del self._variants[key]
            self.report.fell_back(Reason.WEIGHTS_MOVED, strict=self.options.strict)
            return self._trace(key, call)
        leaves = [
            outs[what] if kind == "output" else call[what] if kind == "input" else what
            for kind, what in variant.template
        ]
        return pytree.tree_unflatten(leaves, variant.spec)

    # -- asking --------------------------------------------------------------------------------------------------

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        """The decision for one call, without running it."""
        if disabled():
            return Decision(Route.EAGER, None, Reason.DISABLED)
        try:
            call, key, batch = self._bind(args, kwargs, prepare=False)
        except NotServed as refusal:
            return Decision(Route.EAGER, None, refusal.reason)
        variant = self._variants.get(key)
        if variant is not None and isinstance(variant.graph, CapturedGraph):
            with entered(batch):
                return variant.graph.runner.decide(variant.graph.batch_of(variant.arguments(call)))
        if variant is not None:
            return Decision(Route.COMPILED, None, variant.graph.reason)
        name, dim = next(iter(self.integration.token_dims(call).items()))
        batch = batch or PrefillBatch([call[name].shape[dim]], device=call[name].device)
        return expected_decision(self.options, batch)

    def graphs(self) -> list[CapturedGraph]:
        return [v.graph for v in self._variants.values() if isinstance(v.graph, CapturedGraph)]

    def release(self) -> None:
        """Free the graphs; the next call captures again, without compiling."""
        for graph in self.graphs():
            graph.runner.release()

    def close(self) -> None:
        """Put the module's own forward back and free everything."""
        self.release()
        self._variants.clear()
        module = self.module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
            if self.forward is not getattr(type(module), "forward", None) and not _is_class_forward(
                module, self.forward
            ):
                module.forward = self.forward


_SAME_EAGERLY = frozenset({Reason.DISABLED})


def _is_class_forward(module: nn.Module, forward: Any) -> bool:
    return getattr(forward, "__func__", None) is type(module).forward


@contextlib.contextmanager
def entered(batch: PrefillBatch | None) -> Iterator[None]:
    """Enter a batch unless it is the active one, or there is none."""
    if batch is None or active_batch() is batch:
        yield
    else:
        with batch:
            yield


def _weights(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    yield slots, name, tensor


_numbers = itertools.count()


def _call_forward(**kwargs: Any) -> Any:
    return forward(**kwargs)  # type: ignore[name-defined]  # noqa: F821


def _thin(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of our own around a forward, with a code object and a name of its own.

    Dynamo keeps what it compiled, and counts its limit of recompiles, by code object, and remembers by name which
    arguments have changed.
    """
    name = f"body_{next(_numbers)}"
    code = _call_forward.__code__.replace(co_name=name)
    return types.FunctionType(code, {"forward": forward, "__builtins__": __builtins__}, name)


def _first_line(error: BaseException) -> str:
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
        TypeError: not a module.
        ValueError: an unknown option or a bad value.

    Example:
        >>> body = fgc.compile(model.model, max_tokens=2048, request_slots=16)
    """
    parsed = Options.parse(options)
    if not isinstance(module, nn.Module):
        raise TypeError(f"compile() takes an nn.Module, not {type(module).__name__}")
    if hasattr(module, "_orig_mod"):
        raise TypeError("the module went through torch.compile already; give compile() the module itself")
    if disabled():
        return module
    previous = module.__dict__.get("forward")
    if isinstance(previous, CompiledBody):
        log.info("%s: compiled before; compiling it anew", type(module).__name__)
        previous.close()
    module.forward = CompiledBody(module, parsed)
    return module
