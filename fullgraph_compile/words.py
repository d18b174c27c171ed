"""Words of memory, many of them read at once: one gather in the place of a Python step for each."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np


class Words:
    """The 64-bit words at some addresses, and what they were when this was made.

    Whoever makes it must see to it that the memory stays what it is: all of it is read at each asking.

    Args:
        addresses: multiples of 8.

    Attributes:
        then: what they were, as ``read`` gives it.
    """

    def __init__(self, addresses: Iterable[int]) -> None:
        # In order, so that neighbours are read one after the other.
        places = np.array(sorted(set(addresses)), dtype=np.int64)
        first, last = (int(places[0]), int(places[-1])) if len(places) else (0, -8)
        # All memory between them; only the words themselves are touched.
        span: Any = (ctypes.c_uint64 * ((last - first) // 8 + 1)).from_address(first)
        self._memory = np.frombuffer(span, dtype=np.uint64) if len(places) else np.zeros(0, dtype=np.uint64)
        self._places = (places - first) // 8
        self._addresses = places
        self.then = self.read()

    def __len__(self) -> int:
        return len(self._places)

    def read(self) -> bytes:
        """What each is now."""
        # As bytes they are compared by one memcmp; "wrap" looks at no bounds, which were looked at once.
        return self._memory.take(self._places, mode="wrap").tobytes()

    def same(self) -> bool:
        """Whether each is what it was."""
        return self._memory.take(self._places, mode="wrap").tobytes() == self.then

    def others(self, now: bytes) -> list[int]:
        """Addresses of those that are not what they were, by what ``read`` gave."""
        words = [np.frombuffer(read, dtype=np.uint64) for read in (now, self.then)]
        return self._addresses[words[0] != words[1]].tolist()


def word(address: int) -> int:
    """One word."""
    return ctypes.c_uint64.from_address(address).value


def places(start: int, size: int, value: int) -> set[int]:
    """Where from ``start`` on, in bytes, a word of ``size`` bytes of memory is ``value``."""
    return {at for at in range(0, size, 8) if word(start + at) == value}
