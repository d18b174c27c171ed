"""What is read of an object on the way to what a guard is on, where all that is read for it can be watched."""

from __future__ import annotations

import dis
import types
from collections import OrderedDict
from typing import Any

from torch import nn

from fullgraph_compile.fields import attributes_of, contents_of

DICTS = (dict, OrderedDict)
# Packages whose modules' globals do not change from call to call, as a script's own may.
_STEADY = {"torch", "transformers", "fullgraph_compile", "inspect", "collections"}
# In the place of a value: it is not known, or may change unseen.
UNKNOWN = object()
# In the place of a key.
ATTRIBUTES, CLASS, BASES = (object() for _ in range(3))
CODE, CLOSURE, DEFAULTS = _OF_A_FUNCTION = ("__code__", "__closure__", "__defaults__")
NAME = "__name__"
# What has a name that may be replaced.
NAMED = (type, types.FunctionType)


def read(value: Any, key: Any) -> Any:
    """What a key leads to, if nothing but what is watched is read for it."""
    if key is CLASS:
        return type(value) if plain(value) else UNKNOWN
    if key is ATTRIBUTES:
        return vars(value) if plain(value) else attributes_of(value) if isinstance(value, type) else UNKNOWN
    if key is BASES:
        return value.__mro__ if isinstance(value, type) else UNKNOWN
    if key == NAME and isinstance(value, NAMED):
        return value.__name__
    if key in _OF_A_FUNCTION:
        return getattr(value, key) if type(value) is types.FunctionType else UNKNOWN
    if type(value) is types.CellType:
        return contents_of(value) if key == "cell_contents" else UNKNOWN
    if type(value) in (list, tuple):
        return value[key] if isinstance(key, int) and -len(value) <= key < len(value) else UNKNOWN
    if type(value) is property:
        return value.fget if key == "fget" else UNKNOWN
    if isinstance(value, type):
        return next((attributes_of(c)[key] for c in value.__mro__ if key in c.__dict__), UNKNOWN)
    if steady(value):
        value = vars(value)
    elif plain(value):
        if key == "__dict__":
            return vars(value)
        key = _renamed(value, key)
        if isinstance(key, str) and key not in vars(value) and all_known(value):
            return _of_class(type(value), key)
        value = vars(value)
    return value.get(key, UNKNOWN) if type(value) in DICTS and isinstance(key, (str, int)) else UNKNOWN


def _of_class(cls: type, name: str) -> Any:
    """A class's attribute, if it is the same for each object that reads it."""
    found = next((attributes_of(c)[name] for c in cls.__mro__ if name in c.__dict__), UNKNOWN)
    return UNKNOWN if hasattr(type(found), "__get__") else found


def steady(value: Any) -> bool:
    """Whether it is a module in Python whose globals are watched."""
    return type(value) is types.ModuleType and value.__name__.partition(".")[0] in _STEADY


def dict_of(value: Any) -> dict[str, Any] | None:
    """What is watched of a dict, or of a module in Python."""
    return value if type(value) in DICTS else vars(value) if type(value) is types.ModuleType else None


def _renamed(value: Any, name: Any) -> Any:
    """The attribute that a property which is ``return self.attribute``, and nothing else, stands for."""
    found = getattr(type(value), name, None) if isinstance(name, str) else None
    if not isinstance(found, property) or not isinstance(found.fget, types.FunctionType):
        return name
    steps = [step for step in dis.get_instructions(found.fget) if step.opname not in ("RESUME", "CACHE")]
    simple = [step.opname for step in steps] == ["LOAD_FAST", "LOAD_ATTR", "RETURN_VALUE"]
    return steps[1].argval if simple else UNKNOWN


def all_known(value: Any) -> bool:
    """Whether what attributes an object lacks, too, is told by its ``__dict__`` and its classes."""
    return plain(value) and not isinstance(value, nn.Module) and not hasattr(type(value), "__getattr__")


def plain(value: Any) -> bool:
    """Whether reading an attribute that an object has itself reads nothing but its ``__dict__`` and its class."""
    if isinstance(value, nn.Module):
        return True
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, types.FunctionType)) or kind.__dictoffset__ == 0:
        return False
    reads = kind.__getattribute__  # a method of the class, or of one of its bases
    # That of a config translates names by a table of its class.
    return reads is object.__getattribute__ or str(getattr(reads, "__module__", "")).startswith("transformers.")
