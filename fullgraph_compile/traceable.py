"""What is given to Dynamo to trace, and what a call of it leaves on the module."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

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


def keep_guard(guards: Sequence[Any]) -> list[bool]:
    """Filter for Dynamo: all guards but those on parameters."""
    return [not isinstance(g.value, nn.Parameter) for g in guards]
