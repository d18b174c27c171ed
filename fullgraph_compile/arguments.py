"""What a traced graph is called with: the weights, which stay from call to call, and what a call gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Arguments(list[Any]):
    """A value for each placeholder.

    Attributes:
        weights: those whose addresses graphs keep; the same tuple as long as they are the same tensors, so that one
            look at it tells so.
    """

    __slots__ = ("weights",)

    def __init__(self, values: Sequence[Any], weights: Sequence[int]) -> None:
        super().__init__(values)
        self.weights: tuple[Tensor, ...] = tuple(map(self.__getitem__, weights))


def weights_of(args: Sequence[Any], weights: Sequence[int]) -> tuple[Tensor, ...]:
    """The weights among the values of placeholders, by index."""
    return args.weights if isinstance(args, Arguments) else tuple(map(args.__getitem__, weights))
