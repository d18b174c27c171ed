"""Padded ``[B, S]`` inputs as one packed row ``[1, T]``, and packed rows as a padded batch again.

Where the real tokens lie is found on the host; the device only gathers and scatters by an index of a known size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.host_values import counting, to_device
from fullgraph_compile.integrations.plain import NotServed


class Spans(NamedTuple):
    """Where the real tokens of each row of a ``[B, S]`` batch lie: one run in each row.

    Attributes:
        columns: S.
        lengths: real tokens of each row; 0 is allowed.
        starts: column of each row's first real token, 0 if it has none; None = only the mask on the device knows.
        places: ``[2, T]`` int64: index of each real token in the flat batch, and its column; None = to be found.
    """

    columns: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None
    places: np.ndarray | None = None

    @property
    def dense(self) -> bool:
        """Whether nothing is padded."""
        return min(self.lengths) == self.columns

    @property
    def left(self) -> bool:
        """Whether a row with real tokens may begin with padding."""
        return not self.dense if self.starts is None else any(self.starts)

    @property
    def rows_and_ranks(self) -> np.ndarray:
        """``[2, T]`` int64: the row of each real token, and how many come before it there."""
        lengths = np.array(self.lengths)
        row = np.repeat(np.arange(len(lengths)), lengths)
        return np.stack([row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)])


def right_padded(lengths: Sequence[int], columns: int) -> Spans:
    """Rows that begin with their real tokens."""
    return Spans(columns, tuple(lengths), (0,) * len(lengths))


def spans_of(mask: Tensor) -> Spans:
    """The runs that a ``[B, S]`` mask on the host leaves.

    Raises:
        NotServed: a row's real tokens are not one run, so the mask is not padding.
    """
    rows, columns = mask.shape
    # Integers are read as they are: one op less.
    index = (mask if mask.dtype is torch.int64 else mask != 0).numpy().ravel().nonzero()[0]
    if len(index) == rows * columns:
        return right_padded([columns] * rows, columns)
    if not len(index):
        return right_padded([0] * rows, columns)
    places = np.empty((2, len(index)), dtype=np.int64)
    places[0] = index
    row = index // columns
    column = np.subtract(index, row * columns, out=places[1])
    lengths = np.bincount(row, minlength=rows)
    ends = lengths.cumsum()
    # Of a row without real tokens, that of the row after it.
    starts = column.take(ends - lengths, mode="clip")
    holes = (column[ends - 1] - starts != lengths - 1) & (lengths > 0)
    if holes.any():
        row_with = int(holes.argmax())
        raise NotServed(Reason.MASK, f"attention_mask has holes in row {row_with}: its real tokens are not one run")
    return Spans(columns, tuple(lengths.tolist()), tuple((starts * (lengths > 0)).tolist()), places)


class Packing:
    """Gathers the real tokens of a padded batch, and scatters their rows back.

    Args:
        spans: where they lie.
        device: where the tensors are.
        mask: ``[B, S]`` on the device, if only it knows where each row begins.  It is not read by the host: where it
            contradicts the lengths, everything that is scattered back is NaN.

    Attributes:
        trivial: whether the batch is one packed row already.
    """

    def __init__(self, spans: Spans, device: torch.device, mask: Tensor | None = None) -> None:
        self.spans = spans
        self.device = device
        self.rows, self.columns = len(spans.lengths), spans.columns
        self.mask = mask if spans.starts is None else None
        self.dense = spans.dense
        self.trivial = self.dense and self.rows == 1

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Index of each packed token in the flat batch, and its column, where something is padded."""
        spans = self.spans
        if spans.places is not None:
            index, columns = to_device(spans.places, self.device).unbind()
            return index, columns
        if spans.starts is not None:
            row, rank = spans.rows_and_ranks
            column = rank + np.array(spans.starts)[row]
            index, columns = to_device(np.stack([row * self.columns + column, column]), self.device).unbind()
            return index, columns
        assert self.mask is not None
        rows, ranks = to_device(spans.rows_and_ranks, self.device).unbind()
        columns = ranks + (self.mask != 0).int().argmax(1)[rows]
        return (rows * self.columns + columns).clamp_max(self.rows * self.columns - 1), columns

    @property
    def column_of_token(self) -> Tensor:
        """``[T]`` int64: the column of each packed token."""
        if self.dense:
            return counting(self.columns, self.device).expand(self.rows, self.columns).reshape(-1)
        return self._places[1]

    @cached_property
    def _contradicts(self) -> Tensor | None:
        """0-d bool on the device: whether the mask says something else than the lengths."""
        if self.mask is None:
            return None
        real = self.mask != 0
        if self.dense:
            return ~real.all()
        lengths = to_device(np.array(self.spans.lengths), self.device)
        return (real.sum(1) != lengths).any() | ~real.flatten()[self._places[0]].all()

    def pack(self, padded: Tensor, dim: int = 0) -> Tensor:
        """``[..., B, S, ...]`` to ``[..., 1, T, ...]``; B is dim ``dim``."""
        if self.trivial:
            return padded
        shape = padded.shape
        row = padded.reshape(*shape[:dim], 1, self.rows * self.columns, *shape[dim + 2 :])
        return row if self.dense else row.index_select(dim + 1, self._places[0])

    def unpack(self, rows: Tensor) -> Tensor:
        """``[T, ...]`` to ``[B, S, ...]``, padded positions zero."""
        rest = rows.shape[1:]
        if not self.dense:
            rows = rows.new_zeros((self.rows * self.columns, *rest)).index_copy_(0, self._places[0], rows)
        if self._contradicts is not None and rows.is_floating_point():
            rows = rows.masked_fill(self._contradicts, float("nan"))
        return rows.view(self.rows, self.columns, *rest)
