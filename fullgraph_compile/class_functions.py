"""The functions of a module's classes that a trace went through: Dynamo does not look at them again."""

from __future__ import annotations

import types
from collections.abc import Iterator
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
        functions: what is in them of what was traced through.
    """

    def __init__(self, module: nn.Module, traced: set[types.CodeType]) -> None:
        parts = dict.fromkeys(type(m) for m in module.modules())
        self.classes = list(dict.fromkeys(c for part in parts for c in part.__mro__ if c is not object))
        # As each class has it, for those that call ``super()`` ...
        self._held: list[tuple[type, str, Any]] = []
        self.functions: list[types.FunctionType] = []
        for owner in self.classes:
            for name, value in vars(owner).items():
                found = [function for function in _functions(value) if function.__code__ in traced]
                if found:
                    self._held.append((owner, name, value))
                    self.functions += found
        # ... and as an instance has it, inherited or not.
        names = {name for _, name, _ in self._held}
        used = [(part, name, getattr(part, name, None)) for part in parts for name in names]
        self._used = [held for held in used if isinstance(held[2], (types.FunctionType, property))]
        self._written = [(f, f.__code__, f.__defaults__) for f in self.functions]

    def same(self) -> bool:
        """Whether none was replaced, or given other code or other defaults."""
        return (
            all(vars(owner).get(name) is value for owner, name, value in self._held)
            and all(getattr(part, name, None) is value for part, name, value in self._used)
            and all(f.__code__ is code and f.__defaults__ is defaults for f, code, defaults in self._written)
        )


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The function that an attribute of a class is, or has, and what it wraps."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    while isinstance(value, types.FunctionType):
        yield value
        value = getattr(value, "__wrapped__", None)
