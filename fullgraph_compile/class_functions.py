"""The functions of a module's classes that a trace went through: Dynamo does not look at them again."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator
from itertools import repeat
from typing import Any

from torch import nn
from torch._guards import TracingContext


def traced_code() -> set[types.CodeType]:
    """Code of each function that went into the trace that is being made; to be asked by a backend."""
    return set(TracingContext.get_traced_code() or ())


class ClassFunctions:
    """Methods and properties that a trace went through, to see one that was replaced since.

    Args:
        module: what was traced; the classes are those of its parts.
        traced: code of the functions that went into the trace.

    Attributes:
        classes: those that are looked at.
    """

    def __init__(self, module: nn.Module, traced: set[types.CodeType]) -> None:
        found: dict[tuple[type, str], Any] = {}
        self.classes: list[type] = []
        for part in dict.fromkeys(type(m) for m in module.modules()):
            # As an instance has it, inherited or not, and as each class has it, for those that call ``super()``.
            owners = part.__mro__[: part.__mro__.index(nn.Module)]
            self.classes += owners
            for owner in owners:
                for name, value in vars(owner).items():
                    if not traced.isdisjoint(_codes(value)):
                        found[owner, name] = value
                        if isinstance(as_used := getattr(part, name), (types.FunctionType, property)):
                            found[part, name] = as_used
        self._owners = [owner for owner, _ in found]
        self._names = [name for _, name in found]
        self._functions = list(found.values())

    def same(self) -> bool:
        """Whether none was replaced."""
        return all(map(operator.is_, map(getattr, self._owners, self._names, repeat(None)), self._functions))


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Code of a function, of what it wraps, and of a property."""
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, types.FunctionType):
        yield value.__code__
        value = getattr(value, "__wrapped__", None)
