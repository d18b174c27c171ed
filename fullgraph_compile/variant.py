"""One traced form of a call: how to make it, how to rebuild its result, and how to know that it still holds."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from fullgraph_compile.arguments import Arguments
from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.class_functions import ClassFunctions
from fullgraph_compile.integrations.plain import PlainModule
from fullgraph_compile.numbers_of_calls import number_of
from fullgraph_compile.report import log
from fullgraph_compile.results import Result
from fullgraph_compile.standing_guards import StandingGuards
from fullgraph_compile.traceable import NOTHING, Written
from fullgraph_compile.watching import WORKS


class Owner(NamedTuple):
    """Where a weight hangs in the module, so that a replaced one is seen."""

    slots: dict[str, Any]
    name: str


@dataclass
class Variant:
    """What was traced for one form of the call: which arguments are given, their types and their constants.

    Attributes:
        graph: what the backend made of it.
        traced: the call through Dynamo, for results that cannot be rebuilt without it.
        code: the code object that Dynamo keeps the trace at.
        sample: the arguments of the traced call, on which Dynamo's guards are asked again.
        unbacked: how the token count was traced.
        direct: whether the graph can be called, and its result rebuilt, past Dynamo.
        args: a value for each placeholder; those of ``sizes`` and ``names`` are filled in at each call.
        sizes: placeholders that are the token count.
        names: placeholder -> name of the call argument.
        owners: placeholder -> where the weight hangs.
        tied: where else one hangs, and its placeholder.
        parts: where each submodule hangs.
        given: the traced call's numbers, and tensors that are one, by name.
        numbers: for the numbers of a call, whether the trace is for them.
        functions: what the trace went through of the classes of the module's parts.
        lasting: whether the trace holds for a second call, as its first one left the module and all else that it reads.
        doubted: whether the trace did not hold when all was last asked; it is then asked before it is used.
        meet: why requests of a padded batch met at an earlier call; empty = they did not.
        standing: asks the guards without walking through the module; None = they are asked in full each time.
        in_any_mode: whether ``still_holds`` may be asked without the modes that the trace was made under, as long as
            there are no gradients: entering them takes as long as asking.
        result: how the call's result is made of the graph's.
        written: attributes that the call writes, with the values that it leaves: other calls may leave others.
        graphs: all that ``traced`` may call, which nothing else keeps alive.
    """

    graph: Any
    traced: Callable[..., Any]
    code: types.CodeType
    sample: dict[str, Any]
    unbacked: bool
    module: weakref.ref[nn.Module]
    direct: bool = False
    args: Arguments = field(default_factory=lambda: Arguments((), ()))
    sizes: list[int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    tied: list[tuple[Owner, int]] = field(default_factory=list)
    result: Result | None = None
    numbers: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    parts: list[tuple[dict[str, Any], str, nn.Module]] = field(default_factory=list)
    functions: ClassFunctions | None = None
    lasting: bool = True
    doubted: bool = False
    meet: str = ""
    standing: StandingGuards | None = None
    in_any_mode: bool = False
    graphs: Sequence[Any] = ()
    written: Sequence[Written] = ()
    _locals: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(init=False)
    # Calls until changes are watched for again, and how many those are after the next change: to begin anew takes
    # as long as ten askings, and a module may change at each call.
    _quiet: int = 0
    _pause: int = 0

    def __post_init__(self) -> None:
        self.given = {k: n for k, v in self.sample.items() if (n := number_of(v)) is not None}

    # -- learning ------------------------------------------------------------------------------------------------

    def learn(self, args: Sequence[Any], outputs: Sequence[Any], result: Any) -> None:
        """Match what the graph was called with, and what it returned, to the call's arguments and its result.

        Whatever cannot be matched leaves ``direct`` False.
        """
        module = self.module()
        if not isinstance(self.graph, CapturedGraph) or self._guards() is None or module is None:
            return
        self.parts = [
            (part._modules, name, child) for part in module.modules() for name, child in part.named_children()
        ]
        self.numbers[tuple(self.given.values())] = True
        names = {id(v): k for k, v in self.sample.items() if isinstance(v, Tensor)}
        owners: dict[int, list[Owner]] = {}
        for owner, weight in _weights(module):
            owners.setdefault(id(weight), []).append(owner)
        inputs = self.graph.runner.inputs
        sizes = set(inputs.sizes)
        held: list[Any] = [None] * len(args)
        for i, arg in enumerate(args):
            if i in sizes or not isinstance(arg, Tensor):
                self.sizes.append(i)
            elif id(arg) in names:
                self.names[i] = names[id(arg)]
            elif id(arg) in owners:
                self.owners[i], *tied = owners[id(arg)]
                self.tied += [(owner, i) for owner in tied]
                held[i] = arg
            else:
                return
        if not self.owners.keys() >= set(inputs.weights):
            return
        self.args = Arguments(held, inputs.weights)
        self.result = Result.learn(result, outputs, names)
        # The caller may write to its own.
        self.sample = {k: v.clone() if k in self.given and isinstance(v, Tensor) else v for k, v in self.sample.items()}
        self.direct = self.result is not None

    # -- calling -------------------------------------------------------------------------------------------------

    def arguments(self, call: dict[str, Any]) -> list[Any]:
        """What the graph takes, for a call of this form."""
        args = list(self.args)
        self._fill(args, call)
        return args

    def _fill(self, args: list[Any], call: dict[str, Any]) -> None:
        for i, name in self.names.items():
            args[i] = call[name]
        index, dim = self.graph.token_input
        for i in self.sizes:
            args[i] = args[index].shape[dim]

    def __call__(self, call: dict[str, Any], batch: PrefillBatch | None = None, *, owned: bool = True) -> Any:
        """Make a call, without gradients.

        Args:
            batch: what it is for; None = the active one, or what the model itself would see.
            owned: False if the result is copied before the next call, which may then overwrite it.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(call, batch, owned=owned)
        # Filled in place: a copy of some hundred weights costs more than most of what is done for a call.  One call at
        # a time is made of one body.
        args, result = self.args, self.result
        assert result is not None
        self._fill(args, call)
        try:
            return result(self.graph.serve(args, batch, owned=owned), call)
        finally:
            for i in self.names:
                args[i] = None  # the caller's
            for attribute in self.written:
                held, name, value = attribute
                if held.get(name, NOTHING) is not value:
                    attribute.put()

    # -- holding -------------------------------------------------------------------------------------------------

    def take_new_weights(self) -> bool:
        """Take the tensors that the module has now; False if one, or a submodule, does not fit the trace.

        The graphs notice a new address themselves.
        """
        if self._parts_replaced():
            return False
        now = list(map(dict.get, *zip(*self.owners.values(), strict=True))) if self.owners else []
        held = [self.args[i] for i in self.owners]
        if all(map(operator.is_, now, held)):
            return self._still_tied(self.args)
        values = list(self.args)
        for i, new in zip(self.owners, now, strict=True):
            old = values[i]
            if new is not old:
                if not isinstance(new, Tensor) or _form(new) != _form(old):
                    return False
                values[i] = new
        if not self._still_tied(values):
            return False
        self.args = Arguments(values, self.graph.runner.inputs.weights)
        return True

    def replaced(self) -> bool:
        """Whether the module has other tensors, or other submodules, than this trace."""
        now = map(dict.get, *zip(*self.owners.values(), strict=True)) if self.owners else ()
        if not all(map(operator.is_, now, map(self.args.__getitem__, self.owners))):
            return True
        return not self._still_tied(self.args) or self._parts_replaced()

    def _still_tied(self, values: Sequence[Any]) -> bool:
        """Whether each weight hangs wherever it hung, given the values of the placeholders."""
        return all(owner.slots.get(owner.name) is values[i] for owner, i in self.tied)

    def _parts_replaced(self) -> bool:
        slots, names, children = zip(*self.parts, strict=True) if self.parts else ((), (), ())
        return not all(map(operator.is_, map(dict.get, slots, names), children))

    def needs_asking(self, call: dict[str, Any]) -> bool:
        """Whether one of the ``given`` numbers is another in the call."""
        return any(call[k] != v for k, v in self.given.items())

    def accepts(self, call: dict[str, Any]) -> bool:
        """Whether the trace is for the numbers that the call gives: the same as in the traced call, or unused."""
        numbers = {k: call[k] for k in self.given}
        known = tuple(map(number_of, numbers.values()))
        if known not in self.numbers:
            if len(self.numbers) >= self.MOST_NUMBERS:
                self.numbers.clear()
            self.numbers[known] = self.holds({**self.sample, **numbers})
        return self.numbers[known]

    def holds(self, sample: dict[str, Any] | None = None) -> bool:
        """Whether the module is as it was when it was traced: attributes, flags, hooks, config.

        Asks Dynamo's own guards about the traced call's arguments.  Those on parameters were left out: they are most
        of the cost, and weights are compared by identity and address instead.
        """
        if self.functions is not None and not self.functions.same():
            return False
        entry = self._guards()
        sample = self.sample if sample is None else sample
        return entry is not None and bool(entry.guard_manager.check({"module": self.module(), "kwargs": sample}))

    MOST_PAUSE: ClassVar[int] = 255
    # Values of a call's numbers, of which it is known whether the trace is for them.
    MOST_NUMBERS: ClassVar[int] = 4096

    def stand(self, own_globals: dict[str, Any], integration: PlainModule) -> None:
        """Begin to watch for changes, where this Python and this torch let it be.  All guards must hold.

        Args:
            own_globals: of the function that was traced.
            integration: what knows the module, and switches its attention for the trace.
        """
        module, entry = self.module(), self._guards()
        if not WORKS or module is None or entry is None:
            return
        self._locals = {"module": module, "kwargs": self.sample}
        try:
            root = entry.guard_manager.root
            switching, switched = integration.attention, integration.switched
            # A function that is replaced shows in its class.
            known = self.functions
            classes, functions = (known.classes, known.functions) if known is not None else ([], [])
            self.standing = StandingGuards(
                root, module, own_globals, self._slots(), classes, functions, switching, switched
            )
        except Exception as error:  # Dynamo's guards are nobody's interface
            log.debug("changes of %s cannot be watched: %s", type(module).__name__, error)
            return
        # A guard that holds in another mode too says nothing of it.
        with torch.inference_mode(False), torch.no_grad():
            self.in_any_mode = self.still_holds()
        with torch.inference_mode():
            self.in_any_mode &= self.still_holds()

    def stands(self) -> bool:
        """Whether the module, its weights included, is known to be as it was when all was last asked.

        If not, all must be asked: ``replaced`` and ``holds``.
        """
        # Where the trace did not hold, what is watched may be the very state that it is not for.
        return self.standing is not None and not (self.doubted or self._quiet) and self.standing.watch.same()

    def still_holds(self) -> bool:
        """Asks the guards that ``stands`` leaves out."""
        return self.standing is not None and bool(self.standing.rest.check(self._locals))

    def changed(self) -> None:
        """``stands`` said no: see to it that it can say yes again.  All must be asked after this, not before."""
        module = self.module()
        if self.standing is None or module is None:
            return
        if self._quiet:
            self._quiet -= 1
        else:
            self._quiet, self._pause = self._pause, min(2 * self._pause + 1, self.MOST_PAUSE)
        if not self._quiet:
            try:
                self.standing.again(module, self._slots())
            except (AttributeError, ValueError):
                self.standing = None

    def _slots(self) -> list[dict[str, Any]]:
        """Where all weights and submodules hang."""
        owners = [*self.owners.values(), *(owner for owner, _ in self.tied)]
        slots = {id(d): d for d in (*(o.slots for o in owners), *(p[0] for p in self.parts))}
        return list(slots.values())

    def _guards(self) -> Any:
        entries = _debug_get_cache_entry_list(self.code)
        return entries[0] if len(entries) == 1 else None


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _weights(module: nn.Module) -> Iterator[tuple[Owner, Tensor]]:
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    yield Owner(slots, name), tensor
