"""Pinned memory that a host which runs ahead of the device may write."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.views import Views


class PinnedBlock:
    """One piece of pinned memory.

    Attributes:
        bytes: all of it, uint8.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory

    @cached_property
    def words(self) -> Views:
        """The same as int32."""
        return Views(self.bytes.view(torch.int32))

    @cached_property
    def memory(self) -> memoryview:
        """The same for the host to write."""
        return self.bytes.numpy().data


class PinnedRing:
    """Blocks that the host writes and a device copies from, in turn, without a wait.

    The host runs ahead of the device by many calls, so a block is written again only after the copy that read it has
    finished.  The blocks have two halves, each with one event: a record and a wait take longer than a small copy.

    Calls may be on several streams if each waits for the one before: an event is recorded on the last of them.

    Args:
        device: a CUDA device.
        blocks: how many, even; the host may be ahead by half of them.

    Attributes:
        size: bytes of each block.
    """

    def __init__(self, device: torch.device, blocks: int = 16) -> None:
        self.device = device
        self._half = blocks // 2
        self._blocks: list[PinnedBlock] = []
        self._events: list[Any] = []
        self.size = 0
        self._turn = -1

    def reserve(self, size: int) -> None:
        """Have blocks of at least ``size`` bytes.

        Pinning memory waits for the device, so this comes before the first call.
        """
        if size <= self.size:
            return
        self.wait()
        self.size = max(4096, 1 << (size - 1).bit_length())
        self._blocks = [PinnedBlock(self._new_memory(self.size)) for _ in range(2 * self._half)]
        self._events = [self._new_event() for _ in range(2)]
        self._turn = -1

    def take(self) -> PinnedBlock:
        """A block to write.  The copy that reads it must be on the current stream before the next one is taken."""
        self._turn = (self._turn + 1) % len(self._blocks)
        if self._turn % self._half == 0:
            entered = self._turn // self._half
            self._record(self._events[1 - entered])
            self._events[entered].synchronize()
        return self._blocks[self._turn]

    def wait(self) -> None:
        """Wait until every copy has finished."""
        if self._blocks:
            last = self._events[self._turn // self._half]
            self._record(last)
            last.synchronize()

    def _new_memory(self, size: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _new_event(self) -> Any:
        return torch.cuda.Event()

    def _record(self, event: Any) -> None:
        event.record(torch.cuda.current_stream(self.device))


class WordCopier:
    """Copies int32 words from the host to a device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._ring = PinnedRing(device) if device.type == "cuda" else None

    def reserve(self, words: int) -> None:
        """Make room for copies of so many words, so that no later call pins memory, which waits."""
        if self._ring is not None:
            self._ring.reserve(4 * words)

    def copy(self, words: bytearray, to: Tensor) -> None:
        """Copy ``words`` to a contiguous int32 tensor of their size, on the current stream."""
        if self._ring is None:
            to.copy_(torch.frombuffer(words, dtype=torch.int32))
            return
        size = len(words)
        if size > self._ring.size:
            self._ring.reserve(size)
        block = self._ring.take()
        block.memory[:size] = words
        to.copy_(block.words.first(size // 4), non_blocking=True)
