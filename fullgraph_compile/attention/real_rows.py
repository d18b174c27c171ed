"""What backends of other projects' kernels share: something for each call's metadata, and zeros past the real total."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fullgraph_compile.batch import StaticBatch

T = TypeVar("T")


class PerCall(Generic[T]):
    """A value for each ``StaticBatch``, kept as long as that lives: a bucket's for good, that of one call at exact size
    until the call is over."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[StaticBatch], T]] = {}

    def get(self, static: StaticBatch) -> T | None:
        found = self._values.get(id(static))
        return found[1] if found is not None and found[0]() is static else None

    def set(self, static: StaticBatch, value: T) -> None:
        values, at = self._values, id(static)

        def forget(gone: weakref.ref[StaticBatch]) -> None:
            # Another one may have its address by now.
            if at in values and values[at][0] is gone:
                del values[at]

        values[at] = (weakref.ref(static, forget), value)

    def __len__(self) -> int:
        return len(self._values)


class RealRows:
    """Which rows of a call belong to a request, at a fixed address.

    Some kernels leave padded rows of the output unwritten, and some load padded rows of V: weighed by 0, but 0 * NaN is
    NaN.
    """

    def __init__(self, static: StaticBatch, dtypes: Iterable[torch.dtype]) -> None:
        # Not the metadata itself: what is kept for it must not keep it.
        self._real = static.num_real_tokens
        device = self._real.device
        with torch.inference_mode(False):
            self._rows = torch.arange(static.tokens, dtype=torch.int32, device=device)
            self._mask = torch.zeros(static.tokens, dtype=torch.bool, device=device)
            self._zeros = {dtype: torch.zeros((), dtype=dtype, device=device) for dtype in set(dtypes)}

    def update(self) -> None:
        """Follow what was staged, on the device; outside of the graph, once for all sites."""
        torch.lt(self._rows, self._real, out=self._mask)

    def only(self, rows: Tensor) -> Tensor:
        """``rows``, ``[tokens, heads, size]``, with zeros in padded ones; contiguous, in memory of its own."""
        return torch.where(self._mask[:, None, None], rows.contiguous(), self._zeros[rows.dtype])
