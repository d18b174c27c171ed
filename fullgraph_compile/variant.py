"""One traced form of a call: how to make it, how to rebuild its result, and how to know that it still holds."""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.utils import _pytree as pytree

from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.class_functions import ClassFunctions
from fullgraph_compile.report import log
from fullgraph_compile.standing_guards import StandingGuards
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
        parts: where each submodule hangs.
        numbers: for the numbers of a call, whether the trace is for them.
        functions: what the trace went through of the classes of the module's parts.
        lasting: whether the trace holds for a second call, as its first one left the module and all else that it reads.
        doubted: whether the trace did not hold when all was last asked; it is then asked before it is used.
        standing: asks the guards without walking through the module; None = they are asked in full each time.
        template: for each leaf of the result, the index of an output, the name of an input, or the constant itself.
    """

    graph: Any
    traced: Callable[..., Any]
    code: types.CodeType
    sample: dict[str, Any]
    unbacked: bool
    module: weakref.ref[nn.Module]
    direct: bool = False
    args: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    template: list[tuple[str, Any]] = field(default_factory=list)
    spec: Any = None
    numbers: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    parts: list[tuple[dict[str, Any], str, nn.Module]] = field(default_factory=list)
    functions: ClassFunctions | None = None
    lasting: bool = True
    doubted: bool = False
    standing: StandingGuards | None = None
    _locals: dict[str, Any] = field(default_factory=dict)
    # Calls until changes are watched for again, and how many those are after the next change: to begin anew takes
    # as long as ten askings, and a module may change at each call.
    _quiet: int = 0
    _pause: int = 0

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
        self.numbers[tuple(v for v in self.sample.values() if is_number(v))] = True
        names = {id(v): k for k, v in self.sample.items() if isinstance(v, Tensor)}
        owners = {id(t): owner for owner, t in _weights(module)}
        sizes = set(self.graph.runner.inputs.sizes)
        for i, arg in enumerate(args):
            self.args.append(None)
            if i in sizes or not isinstance(arg, Tensor):
                self.sizes.append(i)
            elif id(arg) in names:
                self.names[i] = names[id(arg)]
            elif id(arg) in owners:
                self.owners[i] = owners[id(arg)]
                self.args[i] = arg
            else:
                return
        leaves, self.spec = pytree.tree_flatten(result)
        at = {id(t): i for i, t in enumerate(outputs) if isinstance(t, Tensor)}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) in at:
                self.template.append(("output", at[id(leaf)]))
            elif isinstance(leaf, Tensor) and id(leaf) in names:
                self.template.append(("input", names[id(leaf)]))
            elif leaf is None or isinstance(leaf, (bool, str)):
                self.template.append(("constant", leaf))
            else:
                return
        self.direct = True

    # -- calling -------------------------------------------------------------------------------------------------

    def serves(self, tokens: int) -> bool:
        """Whether the trace is for this token count: a model may take another branch for another."""
        return not isinstance(self.graph, CapturedGraph) or self.graph.serves(tokens)

    def arguments(self, call: dict[str, Any]) -> list[Any]:
        """What the graph takes, for a call of this form."""
        args = self.args.copy()
        for i, name in self.names.items():
            args[i] = call[name]
        index, dim = self.graph.token_input
        for i in self.sizes:
            args[i] = args[index].shape[dim]
        return args

    def __call__(self, call: dict[str, Any]) -> Any:
        outputs = self.graph(*self.arguments(call))
        leaves = [
            outputs[what] if kind == "output" else call[what] if kind == "input" else what
            for kind, what in self.template
        ]
        return pytree.tree_unflatten(leaves, self.spec)

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
            return True
        for i, new in zip(self.owners, now, strict=True):
            old = self.args[i]
            if new is not old:
                if not isinstance(new, Tensor) or _form(new) != _form(old):
                    return False
                self.args[i] = new
        return True

    def replaced(self) -> bool:
        """Whether the module has other tensors, or other submodules, than this trace."""
        now = map(dict.get, *zip(*self.owners.values(), strict=True)) if self.owners else ()
        if not all(map(operator.is_, now, map(self.args.__getitem__, self.owners))):
            return True
        return self._parts_replaced()

    def _parts_replaced(self) -> bool:
        slots, names, children = zip(*self.parts, strict=True) if self.parts else ((), (), ())
        return not all(map(operator.is_, map(dict.get, slots, names), children))

    def needs_asking(self, call: dict[str, Any]) -> bool:
        """Whether the call gives a number other than the traced call's."""
        return any(is_number(v) and call[k] != v for k, v in self.sample.items())

    def accepts(self, call: dict[str, Any]) -> bool:
        """Whether the trace is for the numbers that the call gives: the same as in the traced call, or unused."""
        numbers = {k: call[k] for k, v in self.sample.items() if is_number(v)}
        known = tuple(numbers.values())
        if known not in self.numbers:
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

    def stand(self) -> None:
        """Begin to watch for changes, where this Python and this torch let it be.  All guards must hold."""
        module, entry = self.module(), self._guards()
        if not WORKS or module is None or entry is None:
            return
        self._locals = {"module": module, "kwargs": self.sample}
        try:
            self.standing = StandingGuards(entry.guard_manager.root, module, self._slots())
        except Exception as error:  # Dynamo's guards are nobody's interface
            log.debug("changes of %s cannot be watched: %s", type(module).__name__, error)

    def stands(self) -> bool:
        """Whether the module, its weights included, is known to be as it was when all was last asked.

        If not, all must be asked: ``replaced`` and ``holds``.
        """
        # Where the trace did not hold, what is watched may be the very state that it is not for.
        return self.standing is not None and not (self.doubted or self._quiet) and self.standing.watch.same()

    def still_holds(self) -> bool:
        """Asks the guards that ``stands`` leaves out."""
        if self.functions is not None and not self.functions.same():
            return False
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
        slots = {id(d): d for d in (*(o.slots for o in self.owners.values()), *(p[0] for p in self.parts))}
        return list(slots.values())

    def _guards(self) -> Any:
        entries = _debug_get_cache_entry_list(self.code)
        return entries[0] if len(entries) == 1 else None


def keep_guard(guards: Sequence[Any]) -> list[bool]:
    """Filter for Dynamo: all guards but those on parameters."""
    return [not isinstance(g.value, nn.Parameter) for g in guards]


def is_number(value: Any) -> bool:
    """A number whose value a trace may or may not depend on."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _weights(module: nn.Module) -> Iterator[tuple[Owner, Tensor]]:
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    yield Owner(slots, name), tensor


_numbers = itertools.count()


def _call_forward(module: Any, kwargs: dict[str, Any]) -> Any:
    return forward(module, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def thin(forward: Callable[..., Any]) -> types.FunctionType:
    """A function of our own around a forward: ``body(module, kwargs)``, with a code object and a name of its own.

    Dynamo keeps what it compiled, and counts its limit of recompiles, by code object, and remembers by name which
    arguments have changed.  It keeps the globals alive too, so the module is an argument.

    Args:
        forward: a function of the module and its arguments by name.
    """
    name = f"body_{next(_numbers)}"
    code = _call_forward.__code__.replace(co_name=name)
    return types.FunctionType(code, {"forward": forward, "__builtins__": __builtins__}, name)


def attributes(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each part's attributes, and a copy of them, to see what a call leaves on the module."""
    return [(vars(m), dict(vars(m))) for m in module.modules()]


def left_something(before: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Whether a call has set an attribute: only Dynamo's own code sets it at each call."""
    return any(now.keys() != then.keys() or any(now[k] is not v for k, v in then.items()) for now, then in before)
