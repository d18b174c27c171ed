"""Integers that the host has worked out, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


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


class _Counting(NamedTuple):
    """0, 1, 2 ... on a device.

    Attributes:
        numbers: ``[1, N]`` int64.
        version: what torch counted of its changes when it was made.
        first: views of the first so many: one costs as much as a small copy.
    """

    numbers: Tensor
    version: int
    first: dict[int, Tensor]


_made: dict[torch.device, _Counting] = {}
_MOST_VIEWS = 4096


def counting(tokens: int, device: torch.device) -> Tensor:
    """0, 1, 2 ...: ``[1, tokens]`` int64, a view of what all calls on the device share, so nothing may write to it."""
    made = _made.get(device)
    if made is None or made.numbers.shape[1] < tokens or made.numbers._version != made.version:
        with torch.inference_mode(False):
            numbers = torch.arange(max(1024, 2 * tokens), device=device)[None]
        if device.type == "cuda":
            # Calls on other streams read it too, and may still read the one that it takes the place of.
            torch.cuda.synchronize(device)
        made = _Counting(numbers, numbers._version, {})
        if type(numbers) is Tensor:  # not one of a mode that the caller is in
            _made[device] = made
    first = made.first.get(tokens)
    if first is None:
        with torch.inference_mode(False):
            first = made.numbers.narrow(1, 0, tokens)
        if type(first) is Tensor:
            if len(made.first) >= _MOST_VIEWS:
                made.first.clear()
            made.first[tokens] = first
    return first
