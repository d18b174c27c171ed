"""Padded ``[B, S]`` inputs as one packed row ``[1, T]``, and packed rows as a padded batch again.

Where the real tokens lie is found on the host; the device only gathers and scatters by an index of a known size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.plain import NotServed


@dataclass(frozen=True)
class Spans:
    """Where the real tokens of each row of a ``[B, S]`` batch lie: one run in each row.

    Attributes:
        columns: S.
        lengths: real tokens of each row; 0 is allowed.
        starts: column of each row's first real token; None = only the mask on the device knows.
    """

    columns: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None

    @property
    def dense(self) -> bool:
        """Whether nothing is padded."""
        return min(self.lengths) == self.columns

    @property
    def left(self) -> bool:
        """Whether a row with real tokens may begin with padding."""
        if self.starts is None:
            return not self.dense
        return any(start and length for start, length in zip(self.starts, self.lengths, strict=True))


def right_padded(lengths: Sequence[int], columns: int) -> Spans:
    """Rows that begin with their real tokens."""
    return Spans(columns, tuple(lengths), (0,) * len(lengths))


def spans_of(mask: Tensor) -> Spans:
    """The runs that a ``[B, S]`` mask on the host leaves.

    Raises:
        NotServed: a row's real tokens are not one run, so the mask is not padding.
    """
    real = (mask != 0).numpy()
    if real.all():
        return right_padded([real.shape[1]] * len(real), real.shape[1])
    runs = np.count_nonzero(real[:, 1:] > real[:, :-1], axis=1) + real[:, 0]
    rows = np.flatnonzero(runs > 1)
    if len(rows):
        raise NotServed(Reason.MASK, f"attention_mask has holes in row {rows[0]}: its real tokens are not one run")
    lengths, starts = real.sum(axis=1), real.argmax(axis=1)
    return Spans(real.shape[1], tuple(lengths.tolist()), tuple(starts.tolist()))


class Packing:
    """Gathers the real tokens of a padded batch, and scatters their rows back.

    Args:
        spans: where they lie.
        device: where the tensors are.
        mask: ``[B, S]`` on the device, if only it knows where each row begins.  It is not read by the host: where it
            contradicts the lengths, everything that is scattered back is NaN.
    """

    def __init__(self, spans: Spans, device: torch.device, mask: Tensor | None = None) -> None:
        self.spans = spans
        self.device = device
        self.rows, self.columns = len(spans.lengths), spans.columns
        self.mask = mask if spans.starts is None else None

    @property
    def trivial(self) -> bool:
        """Whether the batch is one packed row already."""
        return self.rows == 1 and self.spans.dense

    @cached_property
    def _places(self) -> tuple[Tensor | None, Tensor]:
        """Index of each packed token in the flat batch, None where nothing is padded; and its column."""
        lengths = np.array(self.spans.lengths)
        row = np.repeat(np.arange(self.rows), lengths)
        rank = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if self.spans.starts is not None:
            column = rank + np.array(self.spans.starts)[row]
            if self.spans.dense:
                return None, _to_device(column, self.device)
            index, columns = _to_device(np.stack([row * self.columns + column, column]), self.device)
            return index, columns
        assert self.mask is not None
        rows, ranks = _to_device(np.stack([row, rank]), self.device)
        columns = ranks + (self.mask != 0).int().argmax(1)[rows]
        return (rows * self.columns + columns).clamp_max(self.rows * self.columns - 1), columns

    @property
    def column_of_token(self) -> Tensor:
        """``[T]`` int64: the column of each packed token."""
        return self._places[1]

    @cached_property
    def _contradicts(self) -> Tensor | None:
        """0-d bool on the device: whether the mask says something else than the lengths."""
        if self.mask is None:
            return None
        index = self._places[0]
        assert index is not None
        lengths = _to_device(np.array(self.spans.lengths), self.device)
        real = self.mask != 0
        return (real.sum(1) != lengths).any() | ~real.flatten()[index].all()

    def pack(self, padded: Tensor, dim: int = 0) -> Tensor:
        """``[..., B, S, ...]`` to ``[..., 1, T, ...]``; B is dim ``dim``."""
        if self.trivial:
            return padded
        flat = padded.flatten(dim, dim + 1)
        index = None if self.spans.dense else self._places[0]
        return (flat if index is None else flat.index_select(dim, index)).unsqueeze(dim)

    def unpack(self, rows: Tensor) -> Tensor:
        """``[T, ...]`` to ``[B, S, ...]``, padded positions zero."""
        if not self.spans.dense:
            index = self._places[0]
            assert index is not None
            padded = rows.new_zeros((self.rows * self.columns, *rows.shape[1:]))
            rows = padded.index_copy_(0, index, rows)
        if self._contradicts is not None and rows.is_floating_point():
            rows = rows.masked_fill(self._contradicts, float("nan"))
        return rows.unflatten(0, (self.rows, self.columns))


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type != "cuda":
        return host.to(device)
    # A pageable copy would wait for the device.
    return host.pin_memory().to(device, non_blocking=True)
