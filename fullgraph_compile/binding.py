"""A call as its caller wrote it, made one that a trace takes, and checked before anything changes."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.batch_of_call import check_batch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.plain import Bound, NotServed, PlainModule
from fullgraph_compile.interposed import interposed
from fullgraph_compile.numbers_of_calls import is_number
from fullgraph_compile.refusals import Refusals

# Parameters that may be given without their names.
_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Form:
    """What a trace is for: names, types, constants, the token dim of each tensor, and autocast.

    There is one object for each, so that it is told by which it is.

    Attributes:
        arguments: those of each argument.
    """

    __slots__ = ("arguments",)

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments


class _Known(NamedTuple):
    """How calls of one likeness are bound.

    Attributes:
        bind: ``Bound.again`` of the first of them.
        device: of the tokens.
        form: of all of them.
    """

    bind: Callable[[dict[str, Any], PrefillBatch | None], Bound]
    device: torch.device
    form: Form


class Binder:
    """Binds the calls of one module.

    Calls that are alike are looked at once: what a call becomes follows from what ``_likeness`` tells of it, which
    follows from how it looks (``_looks``), its token count included.

    Args:
        module: the module.
        integration: what knows it.
        parameters: those of its forward.
        traced: whether there is a trace for a form.
        before_learning: called before the module is asked what it means by a call; may raise ``NotServed``.
        lock: held while it is asked about a form.
    """

    # More than these are no likenesses, and no looks; all are forgotten then.
    MOST_KNOWN = 256
    MOST_SEEN = 4096

    def __init__(
        self,
        module: weakref.ref[nn.Module],
        integration: PlainModule,
        parameters: list[inspect.Parameter],
        traced: Callable[[Form], bool],
        before_learning: Callable[[], None],
        lock: threading.RLock,
    ) -> None:
        self.module = module
        self.integration = integration
        self.names = [p.name for p in parameters]
        self._by_place = [p.name for p in takewhile(lambda p: p.kind in _PLACED, parameters)]
        self.traced = traced
        self.before_learning = before_learning
        self.lock = lock
        self.refusals = Refusals()
        self._known: dict[Any, _Known] = {}
        self._seen: dict[Any, _Known] = {}
        self._forms: dict[Any, Form] = {}

    def forget(self) -> None:
        """Look at each call anew: the module has changed, or is to be asked again."""
        self._known.clear()
        self._seen.clear()

    def release(self) -> None:
        """Ask again what was refused."""
        self.refusals.clear()
        self.forget()

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], active: PrefillBatch | None, *, ask: bool = True
    ) -> tuple[Bound, Form, int]:
        """The call in canonical form; all is checked here.

        Args:
            active: the batch that the caller is inside of.
            ask: whether small calls of our own may be made, to learn what the module means by a call.

        Returns:
            The call, its form, and its token count.

        Raises:
            NotServed: the call must run as the user wrote it.
            ValueError: the active batch, or the positions, do not describe the call.
        """
        module = self.module()
        assert module is not None
        if module.training:
            raise NotServed(Reason.TRAINING, "call eval() for graphs")
        given = self._named(args, kwargs) if args else kwargs
        if torch.is_grad_enabled() and _wants_grad(module, given):
            raise NotServed(Reason.GRAD, "call under torch.no_grad() or torch.inference_mode()")
        if what := interposed():
            raise NotServed(Reason.INTERPOSED, what)
        looks = _looks(given, active, self.integration.surroundings()) if ask else None
        # None is no key of either.
        known, alike = self._seen.get(looks), None
        if known is None and looks is not None:
            alike = _likeness(looks)
            known = self._known.get(alike)
            if known is not None:
                if len(self._seen) >= self.MOST_SEEN:
                    self._seen.clear()
                self._seen[looks] = known
        if known is not None:
            bound = known.bind(given, active)
            batch = bound.batch
            assert batch is not None
            if batch.device != known.device:
                check_batch(batch, batch.tokens, known.device)
            return bound, known.form, batch.tokens
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
        form = self._form(call, dims)
        if self.traced(form) and self.integration.prepared:
            if alike is not None:
                self._remember(alike, bound, form, device)
        elif tokens and ask:
            with self.lock:
                self._learn(self.integration.prepare, call)
        return bound, form, tokens

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name.

        Raises:
            NotServed: they have no names, or are given twice; the module itself says what it makes of that.
        """
        if len(args) > len(self._by_place):
            most = f"no more than {len(self._by_place)} have names"
            raise NotServed(Reason.ARGUMENTS, f"{len(args)} positional arguments, of which {most}")
        given = dict(zip(self._by_place, args, strict=False))
        for name in kwargs:
            if name in given:
                raise NotServed(Reason.ARGUMENTS, f"{name} is given twice")
        return given | kwargs

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

    def _form(self, call: dict[str, Any], dims: dict[str, int]) -> Form:
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
        has = torch.amp.is_autocast_available(device)  # meta has none
        autocast = has and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        arguments = tuple(parts)
        return self._forms.setdefault((arguments, autocast), Form(arguments))

    # -- calls that are alike ------------------------------------------------------------------------------------

    def _remember(self, alike: Any, bound: Bound, form: Form, device: torch.device) -> None:
        """Note what calls like this one become, if their form follows from their likeness."""
        if bound.again is None or bound.batch is None:
            return
        forms = {part[0]: part[-1] for part in form.arguments}
        for name, *_, sizes in alike[1:-1]:
            # A size that is the token count by chance would stand for it.
            known = not isinstance(sizes, tuple) or name not in forms
            if not known and forms[name] != ((1, *sizes[1:]) if sizes[:1] == (-2,) else sizes):
                return
        if len(self._known) >= self.MOST_KNOWN:
            self._known.clear()
        self._known[alike] = _Known(bound.again, device, form)


def _wants_grad(module: nn.Module, given: dict[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in given.values()) or any(
        p.requires_grad for p in module.parameters()
    )


def _looks(given: dict[str, Any], active: PrefillBatch | None, surroundings: tuple[Any, ...]) -> Any:
    """All that the form of a call may follow from; None = that is more than is told here."""
    # Under autocast a form says more.
    if torch._C._is_any_autocast_enabled():
        return None
    parts: list[Any] = [surroundings, None if active is None else active.tokens]
    for name, value in given.items():
        kind = type(value)
        if kind is Tensor:
            parts.append((name, value.dtype, value.device, value.shape))
        elif value is None or kind is bool or kind is str:
            parts.append((name, kind, value))
        else:
            return None
    return tuple(parts)


def _likeness(looks: tuple[Any, ...]) -> Any:
    """The same for any token count: that, or the columns of a padded batch, stands as -1 wherever it is a size, and its
    rows as -2; None = it has no likeness."""
    surroundings, active, *arguments = looks
    tokens, rows = 0, 1
    parts: list[Any] = [surroundings]
    for argument in arguments:
        *kind, shape = argument
        if not isinstance(shape, torch.Size):
            parts.append(argument)
            continue
        if not tokens:
            if active is not None and active in shape:
                tokens = active
            elif len(shape) > 1:
                rows, tokens = shape[:2]
            # One token, or none, is no dim of its own.
            if tokens < 2:
                return None
        sizes = tuple([-1 if size == tokens else size for size in shape])
        if rows > 1 and shape[:1] == (rows,):
            sizes = (-2, *sizes[1:])
        parts.append((*kind, sizes))
    parts.append(active is not None and active == tokens)
    return tuple(parts)
