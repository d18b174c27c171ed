"""The forward of a model whose body is compiled: sees a call that passes by the body."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullgraph_compile.options import disabled
from fullgraph_compile.own_forward import call_forward, code_of, forward_of_class, kept_forward, reduced

if TYPE_CHECKING:
    from fullgraph_compile.compiled_body import CompiledBody
    from fullgraph_compile.dispatch import Decision


# What the loss of the call that is made compares with; the body is not given it.
given_labels: ContextVar[Any] = ContextVar("given_labels", default=None)


@contextmanager
def _giving(labels: Any) -> Iterator[None]:
    token = given_labels.set(labels)
    try:
        yield
    finally:
        given_labels.reset(token)


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
        self._own = kept_forward(module)
        self.__signature__ = inspect.signature(module.forward)
        self._names = list(self.__signature__.parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self.module(), self._own)

    @property
    def __code__(self) -> types.CodeType:
        """``torch.export`` asks a module's forward for it."""
        return code_of(self.forward)

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own forward."""
        return self._own or forward_of_class(self.module())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As in the body: first what Dynamo finds answered.
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or disabled():
            return call_forward(self.module(), self._own, args, kwargs)
        before = self.body.calls
        labels = self._labels(args, kwargs)
        if labels is None:
            result = self.forward(*args, **kwargs)
        else:
            with _giving(labels):
                result = self.forward(*args, **kwargs)
        if self.body.calls == before:
            self.body.passed_by()
        return result

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any], of_body: dict[str, Any]) -> Decision:
        """What would become of a call, of which the body gets ``of_body``."""
        with _giving(self._labels(args, kwargs)):
            return self.body.explain((), of_body)

    def _labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        labels = kwargs.get("labels")
        if labels is None and len(args) > 1:
            labels = dict(zip(self._names, args, strict=False)).get("labels")
        return labels

    def close(self) -> None:
        """Put the model's own forward back."""
        module = self.module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
            if self._own is not None:
                module.forward = self._own
