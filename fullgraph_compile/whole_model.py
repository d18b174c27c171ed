"""The forward of a model whose body is compiled: sees a call that passes by the body."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullgraph_compile.options import disabled

if TYPE_CHECKING:
    from fullgraph_compile.compiled_body import CompiledBody


class WholeModel:
    """Put in the place of a model's forward, next to its compiled body.

    A head may call the layers itself, or another part of the model.  That call is right as long as nobody thinks that
    it was packed; so it is counted, and an error inside of a batch.

    Args:
        module: the model.
        body: what was put in the place of its body's forward.
    """

    def __init__(self, module: nn.Module, body: CompiledBody) -> None:
        self.module = weakref.ref(module)
        self.body = body
        forward = module.forward
        self._own = None if getattr(forward, "__func__", None) is type(module).forward else forward
        self.__signature__ = inspect.signature(forward)

    def __reduce__(self) -> tuple[Any, ...]:
        return forward_of_class, (self.module(),)

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own forward."""
        return self._own or forward_of_class(self.module())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As in the body: first what Dynamo finds answered.
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or disabled():
            if self._own is not None:
                return self._own(*args, **kwargs)
            module: Any = self.module()
            return type(module).forward(module, *args, **kwargs)
        before = self.body.calls
        result = self.forward(*args, **kwargs)
        if self.body.calls == before:
            self.body.passed_by()
        return result

    def close(self) -> None:
        """Put the model's own forward back."""
        module = self.module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
            if self._own is not None:
                module.forward = self._own


def forward_of_class(module: Any) -> Callable[..., Any]:
    """The forward that a module has by its class."""
    return types.MethodType(type(module).forward, module)
