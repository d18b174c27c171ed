"""Any ``nn.Module``: what ``fgc.compile`` has to know of a model, and what it knows of one that is nobody's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.dispatch import Reason


class NotServed(Exception):
    """A call, or a module, that must run as the user wrote it, with the reason."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


class PlainModule:
    """A module of which nothing is known but its forward.

    Its attention is ``scaled_dot_product_attention``, found in the traced graph, or calls of the op itself.
    """

    # Whether ``attention`` makes the module's attention calls the op.  If not, they are found in the traced graph:
    # torch's own attention, which cannot be traced with an unbacked token count.
    op_attention = False

    # Whether the module takes a restart of ``position_ids`` for a new request where no batch says so.
    restarts_are_requests = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = module.forward

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Within it, the module's attention calls are the op."""
        yield

    def prepare(self, call: dict[str, Any]) -> None:
        """Look at the module before it is traced the first time; ``call`` holds the arguments of that call.

        Raises:
            NotServed: the module cannot be captured.
        """

    def canonical(self, call: dict[str, Any], batch: PrefillBatch | None) -> dict[str, Any]:
        """The call in its one canonical form: arguments by name, nothing that has no effect.

        Raises:
            NotServed: the call has an argument that a graph cannot serve.
        """
        return call

    def token_dims(self, call: dict[str, Any]) -> dict[str, int]:
        """Token dim of each argument that has one: dim 1 of ``[1, T, ...]``, dim 0 of ``[T, ...]``.

        Raises:
            NotServed: the first tensor has a batch dim above 1.
        """
        dims: dict[str, int] = {}
        tokens: int | None = None
        for name, value in call.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or name in self.not_tokens:
                continue
            if tokens is None:
                dims[name] = packed_dim(name, value)
                tokens = value.shape[dims[name]]
                continue
            dim = 1 if value.dim() > 1 and value.shape[0] == 1 else 0
            if value.shape[dim] == tokens:
                dims[name] = dim
            elif value.shape[-1] == tokens:
                dims[name] = value.dim() - 1
        return dims

    # Arguments that are never token-sized, whatever their size happens to be.
    not_tokens: frozenset[str] = frozenset()


def packed_dim(name: str, value: Tensor) -> int:
    """Token dim of the tensor that tells the token count: ``[1, T]`` or ``[T]``, floats with one more dim."""
    rows = 2 if value.dtype.is_floating_point else 1
    if value.dim() == rows:
        return 0
    if value.dim() == rows + 1 and value.shape[0] == 1:
        return 1
    raise NotServed(Reason.BATCHED, f"{name} has shape {tuple(value.shape)}")
