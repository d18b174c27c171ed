"""A call as its caller wrote it, made one that a trace takes, and checked before anything changes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullgraph_compile.batch import PrefillBatch, active_batch
from fullgraph_compile.batch_of_call import check_batch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.plain import Bound, NotServed, PlainModule
from fullgraph_compile.interposed import interposed
from fullgraph_compile.refusals import Refusals
from fullgraph_compile.variant import is_number


class Formed(NamedTuple):
    """A call that may be served, and its form.

    Attributes:
        bound: the call in canonical form.
        form: what a traced graph is for: names, types, constants, and the token dim of each tensor.
        tokens: its token count.
    """

    bound: Bound
    form: Any
    tokens: int


class _Repeated(NamedTuple):
    """How a call inside a batch is bound that is like an earlier one in all but its tokens.

    Attributes:
        call: the canonical call, but for the tensors.
        taken: tensors that are as they are given.
        positions: whether the positions are those of the batch.
        device: of the tokens.
    """

    call: dict[str, Any]
    taken: tuple[str, ...]
    positions: bool
    device: torch.device
    form: Any


class Binder:
    """Binds the calls of one module.

    Calls that are alike are looked at once: what a call becomes follows from what ``_likeness`` tells of it.

    Args:
        module: the module.
        integration: what knows it.
        traced: whether there is a trace for a form.
        before_learning: called before the module is asked what it means by a call; may raise ``NotServed``.
        lock: held while it is asked about a form.
    """

    # More than these are no likenesses; all are forgotten then.
    MOST_KNOWN = 256

    def __init__(
        self,
        module: weakref.ref[nn.Module],
        integration: PlainModule,
        names: list[str],
        traced: Callable[[Any], bool],
        before_learning: Callable[[], None],
        lock: threading.RLock,
    ) -> None:
        self.module = module
        self.integration = integration
        self.names = names
        self.traced = traced
        self.before_learning = before_learning
        self.lock = lock
        self.refusals = Refusals()
        self._known: dict[Any, _Repeated] = {}

    def forget(self) -> None:
        """Look at each call anew: the module has changed, or is to be asked again."""
        self._known.clear()

    def release(self) -> None:
        """Ask again what was refused."""
        self.refusals.clear()
        self.forget()

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, ask: bool = True) -> Formed:
        """The call in canonical form, and the form's key; all is checked here.

        Args:
            ask: whether small calls of our own may be made, to learn what the module means by a call.

        Raises:
            NotServed: the call must run as the user wrote it.
            ValueError: the active batch, or the positions, do not describe the call.
        """
        module = self.module()
        assert module is not None
        if module.training:
            raise NotServed(Reason.TRAINING, "call eval() for graphs")
        given = {**dict(zip(self.names, args, strict=False)), **kwargs} if args else kwargs
        if torch.is_grad_enabled() and _wants_grad(module, given):
            raise NotServed(Reason.GRAD, "call under torch.no_grad() or torch.inference_mode()")
        if what := interposed():
            raise NotServed(Reason.INTERPOSED, what)
        active = active_batch()
        alike = self._likeness(given, active) if active is not None and ask else None
        if alike is not None and alike in self._known:
            assert active is not None
            return _bound_as(self._known[alike], given, active)
        for name, value in given.items():
            if isinstance(value, Tensor) and type(value) is not Tensor and type(value) is not nn.Parameter:
                raise NotServed(Reason.ARGUMENTS, f"{name} is a {type(value).__name__}")
        self.refusals.check(None, ask=ask)
        if ask:
            self._learn(self.integration.learn, given)
        bound = self.integration.bind(given, active)
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
        formed = Formed(bound, self._form(call, dims), tokens)
        if self.traced(formed.form) and self.integration.prepared:
            if alike is not None and bound.batch is active:
                self._remember(alike, given, formed, device)
        elif tokens and ask:
            with self.lock:
                self._learn(self.integration.prepare, call)
        return formed

    def _learn(self, question: Callable[[dict[str, Any]], None], arguments: dict[str, Any]) -> None:
        """Ask the module what it means by a call, or what its attention means, before it is traced.

        Raises:
            NotServed: it cannot be marked; calls run as the user wrote them.
        """
        if not self.integration.prepared:
            self.before_learning()
        try:
            question(arguments)
        except NotServed as refusal:
            self.refusals.add(None, refusal)
            raise

    def _form(self, call: dict[str, Any], dims: dict[str, int]) -> Any:
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

    # -- calls that are alike ------------------------------------------------------------------------------------

    def _likeness(self, given: dict[str, Any], active: PrefillBatch) -> Any:
        """All that binding a call may read of it and of its batch, but the token count, which stands as -1; None = it
        has no likeness."""
        tokens = active.tokens
        # One token, or none, is no dim of its own; under autocast a form says more.
        if tokens < 2 or torch._C._is_any_autocast_enabled():
            return None
        of_batch = active.requests > 1, active.cache is not None, any(active.cached_tokens)
        parts: list[Any] = [(self.integration.surroundings(), of_batch)]
        for name, value in given.items():
            kind = type(value)
            if kind is Tensor:
                shape = tuple([-1 if size == tokens else size for size in value.shape])
                parts.append((name, value.dtype, value.device, shape))
            elif value is None or kind is bool or kind is str:
                parts.append((name, kind, value))
            else:
                return None
        return tuple(parts)

    def _remember(self, alike: Any, given: dict[str, Any], formed: Formed, device: torch.device) -> None:
        """Note what calls like this one become, if that is what they are given."""
        bound = formed.bound
        if bound.back is not None or bound.padded or bound.device_reads:
            return
        if any(isinstance(v, Tensor) and bound.call.get(n) is not v for n, v in given.items()):
            return  # what it is may depend on what is in it
        assert bound.batch is not None
        form = {part[0]: part[-1] for part in formed.form[0]}
        shapes = {part[0]: part[-1] for part in alike[1:]}
        taken = tuple(n for n, v in given.items() if isinstance(v, Tensor))
        # A size that is the token count by chance would stand for it.
        if any(form[name] != shapes[name] for name in taken):
            return
        made = [n for n, v in bound.call.items() if isinstance(v, Tensor) and n not in taken]
        if made and (made != ["position_ids"] or bound.call["position_ids"] is not bound.batch.row_of_positions):
            return
        if len(self._known) >= self.MOST_KNOWN:
            self._known.clear()
        constants = {n: None if isinstance(v, Tensor) else v for n, v in bound.call.items()}
        self._known[alike] = _Repeated(constants, taken, bool(made), device, formed.form)


def _bound_as(known: _Repeated, given: dict[str, Any], active: PrefillBatch) -> Formed:
    if active.device != known.device:
        check_batch(active, active.tokens, known.device)
    call = known.call.copy()
    for name in known.taken:
        call[name] = given[name]
    if known.positions:
        call["position_ids"] = active.row_of_positions
    return Formed(Bound(call, active), known.form, active.tokens)


def _wants_grad(module: nn.Module, given: dict[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in given.values()) or any(
        p.requires_grad for p in module.parameters()
    )
