"""Pinned memory that a host which runs ahead of the device may write."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Lengths:
    """The first words of a block, of a few lengths that come again and again: a view costs as much as a small copy.

    Args:
        block: one-dimensional.
    """

    def __init__(self, block: Tensor) -> None:
        self.block = block
        self._views: dict[int, Tensor] = {}

    def first(self, words: int) -> Tensor:
        """The first ``words`` of the block."""
        view = self._views.get(words)
        if view is None:
            view = self._views[words] = self.block[:words]
        return view


class PinnedRing:
    """Copies int32 words from the host to a device without waiting for it.

    The host runs ahead of the device by many calls, so each pinned block is written again only after the copy that
    read it has finished.
    """

    BLOCKS = 16

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Each with its words as an array, and what tells that its last copy has finished.
        self._blocks: list[tuple[Lengths, np.ndarray, torch.cuda.Event]] = []
        self._size = 0
        self._turn = 0

    def reserve(self, words: int) -> None:
        """Make room for copies of so many words, so that no later call pins memory, which waits."""
        if self.device.type == "cuda" and words > self._size:
            self.wait()
            self._size = max(words, 256)
            with torch.inference_mode(False):
                pinned = [torch.empty(self._size, dtype=torch.int32, pin_memory=True) for _ in range(self.BLOCKS)]
                self._blocks = [(Lengths(block), block.numpy(), torch.cuda.Event()) for block in pinned]

    def copy(self, words: np.ndarray, to: Tensor) -> None:
        """Copy ``words`` to a contiguous int32 tensor of their size, on the current stream."""
        if self.device.type != "cuda":
            to.copy_(torch.from_numpy(words))
            return
        self.reserve(len(words))
        self._turn = (self._turn + 1) % self.BLOCKS
        pinned, array, event = self._blocks[self._turn]
        event.synchronize()
        array[: len(words)] = words
        to.copy_(pinned.first(len(words)), non_blocking=True)
        event.record()

    def wait(self) -> None:
        """Wait until every copy has finished."""
        for _, _, event in self._blocks:
            event.synchronize()
