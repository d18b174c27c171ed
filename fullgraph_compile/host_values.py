"""Integers that the host has worked out, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fullgraph_compile.views import Views


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as an int64 tensor on a device, without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type == "cpu":
        return host
    # A pageable copy would wait for the device.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


_counts = np.arange(8192).tobytes()


def counted(starts: Sequence[int], ends: Sequence[int]) -> np.ndarray:
    """The integers from each start to before its end, one range after the other: int64.

    Put together of bytes, as this is before each launch: what is asked of numpy costs more than what it does.
    """
    global _counts
    counts = _counts
    if len(counts) < 8 * max(ends):
        counts = _counts = np.arange(2 * max(ends)).tobytes()
    ranges = [counts[8 * start : 8 * end] for start, end in zip(starts, ends, strict=True)]
    return np.frombuffer(bytearray().join(ranges), dtype=np.int64)


class _Counted(NamedTuple):
    """0, 1, 2 ... on a device.

    Attributes:
        flat: ``[N]`` int64.
        row: the same memory as ``[1, N]``.
        version: what ``flat`` had when it was made.
    """

    flat: Views
    row: Views
    version: int


_made: dict[torch.device, _Counted] = {}


def counting(tokens: int, device: torch.device) -> Tensor:
    """0, 1, 2 ...: ``[1, tokens]`` int64, a view of what all calls on the device share, so nothing may write to it."""
    return _counting(tokens, device).row.first(tokens)


def _counting(tokens: int, device: torch.device) -> _Counted:
    made = _made.get(device)
    if made is None or len(made.flat.tensor) < tokens or made.flat.tensor._version != made.version:
        with torch.inference_mode(False):
            flat = torch.arange(max(1024, 2 * tokens), device=device)
            made = _Counted(Views(flat), Views(flat[None]), flat._version)
        if device.type == "cuda":
            # Calls on other streams read it too, and may still read the one that it takes the place of.
            torch.cuda.synchronize(device)
        if type(flat) is Tensor:  # not one of a mode that the caller is in
            _made[device] = made
    return made


# More than these are put together on the host: each costs a step there.
_MOST_RANGES = 64


def ranges(starts: Sequence[int], ends: Sequence[int], device: torch.device) -> Tensor:
    """What ``counted`` gives, on a device: ``[T]`` int64, the caller's own.

    Put together there of what all calls share: memory that is pinned for a copy from the host takes longer.
    """
    if len(starts) > _MOST_RANGES or torch._C._len_torch_dispatch_stack():  # under a mode tensors may be others
        return to_device(counted(starts, ends), device)
    made = _counting(max(ends), device).flat
    parts = zip(starts, ends, strict=True)
    return torch.cat([made.tensor[start:end] if start else made.first(end) for start, end in parts])
