"""Any ``nn.Module``: what ``fgc.compile`` has to know of a model, and what it knows of one that is nobody's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.own_forward import call_forward, forward_of_class, kept_forward, reduced


class NotServed(Exception):
    """A call, or a module, that must run as the user wrote it, with the reason."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


class ModuleChanged(Exception):
    """What was traced does not hold, and what was learned of the module before may not either."""


class Bound(NamedTuple):
    """A call as a trace takes it.

    Attributes:
        call: arguments by name, in their one canonical form.
        batch: what the call is for; None leaves it to the masks of the traced graph.
        back: from the result to what the caller expects; None = it is that.
        device_reads: how often the device was read to tell requests apart.
        padded: whether the caller's own form is a padded batch, which means the same without a batch.
        copied: whether ``back`` copies each tensor of the result, which then need not be the caller's own before.
        again: makes the same of another call, and of the batch that it is in, as long as the arguments have the same
            names and shapes, but for token counts and rows, and those that are no tensors are the same; may raise what
            ``bind`` raises.  None = each call is looked at.
    """

    call: dict[str, Any]
    batch: PrefillBatch | None = None
    back: Callable[[Any], Any] | None = None
    device_reads: int = 0
    padded: bool = False
    copied: bool = False
    again: Callable[[dict[str, Any], PrefillBatch | None], Bound] | None = None

    @property
    def several_padded(self) -> bool:
        """Whether it is a padded batch of several requests."""
        return self.padded and self.batch is not None and self.batch.requests > 1


@dataclass(frozen=True)
class AsGiven:
    """``Bound.again`` of packed calls in a batch: the very tensors that are given, and what is the same each time.

    Attributes:
        constants: arguments that are no tensors.
        tensors: names of those that are.
        positions: whether the positions are those of the batch.
        check: raises ``NotServed`` for a batch that the module cannot be given so; None = it can be given any.
    """

    constants: dict[str, Any]
    tensors: tuple[str, ...]
    positions: bool
    check: Callable[[PrefillBatch], None] | None = None

    def __call__(self, given: dict[str, Any], active: PrefillBatch | None) -> Bound:
        assert active is not None
        if self.check is not None:
            self.check(active)
        call = self.constants.copy()
        for name in self.tensors:
            call[name] = given[name]
        if self.positions:
            call["position_ids"] = active.row_of_positions
        return Bound(call, active)


@dataclass(frozen=True)
class OneRow:
    """``Bound.again`` of calls of one row ``[1, T]`` outside of a batch: one request, and the result as it is.

    Attributes:
        lead: name of the tokens.
        as_given: makes the call.
        bind: looks at the call, which is of another kind after all.
    """

    lead: str
    as_given: AsGiven
    bind: Callable[[dict[str, Any], PrefillBatch | None], Bound]

    def __call__(self, given: dict[str, Any], active: PrefillBatch | None) -> Bound:
        if active is not None:
            return self.bind(given, active)
        tokens = given[self.lead]
        return self.as_given(given, PrefillBatch.of_checked([tokens.shape[1]], tokens.device))


class PlainModule:
    """A module of which nothing is known but its forward.

    Its attention is ``scaled_dot_product_attention``, found in the traced graph, or calls of the op itself.
    """

    # Whether ``attention`` makes the module's attention calls the op.  If not, they are found in the traced graph:
    # torch's own attention, which cannot be traced with an unbacked token count.
    op_attention = False
    # Whether ``attention`` changes the module, or what it reads, for its time.
    switches = False
    # Whether rows of several requests in one call are not what each alone would give, whatever its graph looks like.
    one_request = False

    @property
    def all_or_nothing(self) -> bool:
        """Whether what cannot be captured is better left to the module itself: it was not seen to be right in other
        ways."""
        return False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._own_forward = kept_forward(module)

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's forward, as the user wrote it."""
        return self._own_forward or forward_of_class(self.module)

    def reduced(self) -> tuple[Any, ...]:
        """What a copy of the module has as its forward, as ``__reduce__`` says it."""
        return reduced(self.module, self._own_forward)

    def call_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it, so that an outer trace follows."""
        return call_forward(self.module, self._own_forward, args, kwargs)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Within it, the module's attention calls are the op."""
        yield

    @property
    def switched(self) -> list[dict[str, Any]]:
        """Dicts of the module in which ``attention`` puts something else for its time."""
        return []

    def traceable(self) -> Callable[..., Any]:
        """What is traced: the forward as a function of the module and the canonical arguments by name."""
        forward = self.forward
        return getattr(forward, "__func__", None) or (lambda module, **kwargs: forward(**kwargs))

    def learn(self, given: dict[str, Any]) -> None:
        """Ask the module what it means by a call, before the first one, whose arguments are ``given``."""

    @property
    def prepared(self) -> bool:
        """Whether ``prepare`` is done with."""
        return True

    def forget(self) -> None:
        """What was learned may not hold any more: the module has changed."""

    def prepare(self, call: dict[str, Any]) -> None:
        """Look at the module before a form of the call is traced the first time.

        Raises:
            NotServed: the module cannot be captured.
        """

    def check_trace(
        self,
        call: dict[str, Any],
        traced: Callable[[dict[str, Any]], Any],
        lengths: tuple[int, ...] = (5, 4),
        *,
        strict: bool = True,
    ) -> bool:
        """Compare what was traced of a form of the call with the module itself: whether they are equal.

        Args:
            call: a call of that form.
            traced: makes such a call by the trace; several requests in it are those of the active batch.
            lengths: tokens of each request.
            strict: whether a difference is raised.

        Raises:
            NotServed: they differ, or the module cannot make such a call.
        """
        return True

    def bind(self, given: dict[str, Any], active: PrefillBatch | None) -> Bound:
        """The call in its one canonical form: arguments by name, nothing that has no effect.

        Args:
            given: the arguments by name.
            active: the batch that the caller is inside of.

        Raises:
            NotServed: the call has an argument that a graph cannot serve.
            ValueError: the batch does not describe the call.
        """
        tensors = tuple(name for name, value in given.items() if isinstance(value, Tensor))
        constants = {name: value for name, value in given.items() if name not in tensors}
        return Bound(given, active, again=AsGiven(constants, tensors, positions=False))

    def surroundings(self) -> tuple[Any, ...]:
        """What ``bind`` reads besides the arguments and the batch, and what was learned: hashable."""
        return ()

    def token_dims(self, call: dict[str, Any]) -> dict[str, int]:
        """Token dim of each argument that has one: dim 1 of ``[1, T, ...]``, dim 0 of ``[T, ...]``.

        Raises:
            NotServed: the first tensor has a batch dim above 1.
        """
        dims: dict[str, int] = {}
        tokens: int | None = None
        for name, value in call.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or name in self.not_tokens:
                continue
            if tokens is None:
                dims[name] = packed_dim(name, value)
                tokens = value.shape[dims[name]]
                continue
            dim = 1 if value.dim() > 1 and value.shape[0] == 1 else 0
            if value.shape[dim] == tokens:
                dims[name] = dim
            elif value.shape[-1] == tokens:
                dims[name] = value.dim() - 1
        return dims

    # Arguments that are never token-sized, whatever their size happens to be.
    not_tokens: frozenset[str] = frozenset()


def packed_dim(name: str, value: Tensor) -> int:
    """Token dim of the tensor that tells the token count: ``[1, T]`` or ``[T]``, floats with one more dim."""
    rows = 2 if value.dtype.is_floating_point else 1
    if value.dim() == rows:
        return 0
    if value.dim() == rows + 1 and value.shape[0] == 1:
        return 1
    raise NotServed(Reason.BATCHED, f"{name} has shape {tuple(value.shape)}")


def device_of(call: dict[str, Any]) -> torch.device:
    """Where the tensors of a call are."""
    return next(v.device for v in call.values() if isinstance(v, Tensor))
