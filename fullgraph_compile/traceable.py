"""What is given to Dynamo to trace, and what a call of it leaves behind besides its result."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import base

_numbers = itertools.count()
NOTHING = object()
"""The value of an attribute that is not there."""


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


class Written(NamedTuple):
    """An attribute that a call writes.

    Attributes:
        attributes: of the object.
        name: of the attribute.
        value: that it had before the call.
    """

    attributes: dict[str, Any]
    name: str
    value: Any

    @property
    def put_back(self) -> bool:
        """Whether it has that value."""
        return self.attributes.get(self.name, NOTHING) is self.value

    def put(self) -> None:
        """Give it that value."""
        if self.value is NOTHING:
            self.attributes.pop(self.name, None)
        else:
            self.attributes[self.name] = self.value


def written_attributes() -> list[Written] | None:
    """What the call that is being traced writes to objects that it did not make.  None if it writes anything but
    constants to attributes: an entry of a dict or a list, a global, a value that is another at each call.

    Asked by the backend, while the trace is open: only Dynamo's own code writes, and does so after each call.
    """
    effects = symbolic_convert.InstructionTranslator.current_tx().output.side_effects
    objects = {id(x): x for x in effects.keepalive}
    written = []
    for i, variable in list(effects.id_to_variable.items()):
        kind = variable.mutation_type
        new = not isinstance(kind, (base.ValueMutationExisting, base.AttributeMutationExisting))
        if new or not effects.is_modified(variable):
            continue
        values = effects.store_attr_mutations.get(variable, {})
        held = getattr(objects.get(i), "__dict__", None)
        if not values or type(held) is not dict or not all(v.is_python_constant() for v in values.values()):
            return None
        written += [Written(held, name, held.get(name, NOTHING)) for name in values]
    return written


# Guards on what only a backward, or a call with gradients, asks for; calls are served without.
_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_WITH_KWARGS = "_with_kwargs"
# Where transformers notes each class that a model is made of: it grows, and what it says of a class stays.  From 5.24
# on it is no plain dict, so Dynamo tells its keys by their places, and all guards on it are for its length only.
_GROWS = "._CAN_RECORD_REGISTRY"
_PLACED = f"{_GROWS}))["


def keep_guard(guards: Sequence[Any]) -> list[bool]:
    """Filter for Dynamo: which guards say something that is not known otherwise.

    Those on parameters do not, nor those on tensors and hooks for a backward, and which hooks of a module take keyword
    arguments means nothing as long as it has none.  These are two fifths of a decoder's guards.  Nor does how many
    classes of models there are.
    """
    no_hooks = {g.name for g in guards if g.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT"}
    placed = any(_PLACED in g.name for g in guards)

    def keep(guard: Any) -> bool:
        if isinstance(guard.value, nn.Parameter) or guard.guard_type == "AUTOGRAD_SAVED_TENSORS_HOOKS":
            return False
        name: str = guard.name
        if name not in no_hooks:
            return not (placed and _GROWS in name)
        of_none = name.endswith(_WITH_KWARGS) and name.removesuffix(_WITH_KWARGS) in no_hooks
        return not (of_none or name.endswith(_OF_BACKWARD))

    return list(map(keep, guards))
