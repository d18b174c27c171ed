"""A module's own forward, where ours stands in its place."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def kept_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of the module itself; None = that of its class, which may get another one."""
    forward = module.forward
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def reduced(module: Any, kept: Callable[..., Any] | None) -> tuple[Any, ...]:
    """What a copy of the module, or one that was saved and loaded, has in the place of ours: its own forward."""
    return (forward_of_class, (module,)) if kept is None else (_itself, (kept,))


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def code_of(forward: Callable[..., Any]) -> types.CodeType:
    """The code of a function, a method, or what holds one."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    return forward.__code__ if hasattr(forward, "__code__") else type(forward).__call__.__code__


def forward_of_class(module: Any) -> Callable[..., Any]:
    """The forward that a module has by its class."""
    return types.MethodType(type(module).forward, module)


def call_forward(module: Any, kept: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it.  Dynamo follows this into an outer trace, which it does not where a bound method is made."""
    if kept is not None:
        return kept(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)
