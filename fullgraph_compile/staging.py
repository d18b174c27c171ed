"""Staging: one pinned block, one copy, and every word of the metadata rewritten at every replay."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch, StaticBatch

if TYPE_CHECKING:
    from fullgraph_compile.cache import PagedKVCache


class Poison(enum.Enum):
    """What tests fill the static buffers with before each staging, so that a word which is not rewritten shows.

    Impossible values hide some faults (an offset past the end reads as "no more requests"), so there is a
    plausible dress too: the metadata of another legal batch.
    """

    IMPOSSIBLE = "impossible"
    PLAUSIBLE = "plausible"


@dataclass(frozen=True)
class _Layout:
    """Where each vector lies in the block of int32."""

    slots: int

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        s = self.slots
        return (
            ("num_real_tokens", 1), ("cu_q", s + 1), ("cu_k", s + 1), ("q_lens", s), ("k_lens", s),
            ("pad_cu_q", s + 2), ("pad_cu_k", s + 2),
        )  # fmt: skip

    @property
    def size(self) -> int:
        return sum(n for _, n in self.parts)

    def views(self, block: Tensor) -> dict[str, Tensor]:
        views, at = {}, 0
        for name, n in self.parts:
            views[name] = block[at : at + n]
            at += n
        return views

    def pack(self, batch: PrefillBatch, tokens: int) -> np.ndarray:
        """All metadata of a batch, tails included, for a call of ``tokens`` rows."""
        s, r = self.slots, batch.requests
        new, cached = batch.new_tokens, batch.cached_tokens
        keys = [n + c for n, c in zip(new, cached, strict=True)]
        total_q, total_k = batch.tokens, sum(keys)
        zeros = [0] * (s - r)
        cu_q = _offsets(new) + [total_q] * (s - r)
        cu_k = _offsets(keys) + [total_k] * (s - r)
        words = [total_q, *cu_q, *cu_k, *new, *zeros, *keys, *zeros, *cu_q, tokens, *cu_k, total_k]
        return np.array(words, dtype=np.int32)


def _offsets(lengths: list[int]) -> list[int]:
    offsets, total = [0], 0
    for n in lengths:
        total += n
        offsets.append(total)
    return offsets


class StaticBuffers:
    """Owns the metadata that captured graphs read: one device block for each bucket, at a fixed address.

    The host runs ahead of the device by many calls, so each pinned block of a ring is written again only after the
    copy that read it has finished.
    """

    RING = 16

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: dict[int, tuple[_Layout, Tensor, StaticBatch]] = {}
        self._ring: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._turn = 0

    def add(self, tokens: int, slots: int, max_k: int, cache: PagedKVCache | None = None) -> StaticBatch:
        """Allocate the metadata of one bucket.

        Args:
            tokens: the bucket, which also bounds the new tokens of a request.
            slots: its request slots.
            max_k: bound of cached and new tokens of a request.
            cache: the KV cache that the bucket's graph reads and writes.
        """
        layout = _Layout(slots)
        with torch.inference_mode(False):
            block = torch.zeros(layout.size, dtype=torch.int32, device=self.device)
        static = StaticBatch(tokens, slots, max_q=max(2, tokens), max_k=max_k, **layout.views(block))
        self._blocks[tokens] = (layout, block, static)
        return static

    def stage(self, batch: PrefillBatch, tokens: int, poison: Poison | None = None) -> StaticBatch:
        """Write a batch into the metadata of bucket ``tokens``, on the current stream, without waiting.

        The batch is checked against the bounds that the bucket's kernels got at capture; one outside of them is an
        error here, as it would read out of bounds there.
        """
        layout, block, static = self._blocks[tokens]
        if batch.tokens > static.tokens or batch.requests > static.slots or batch.longest > static.max_k:
            raise ValueError(
                f"{batch!r}, longest {batch.longest}, does not fit bucket {static.tokens} with {static.slots} "
                f"request slots and {static.max_k} tokens a request"
            )
        if poison is not None:
            block.copy_(torch.from_numpy(self._poisoned(layout, static, poison)))
        self._copy(layout.pack(batch, tokens), block)
        return static

    def exact(self, batch: PrefillBatch) -> StaticBatch:
        """Metadata of a batch at its exact size, in memory of its own: for calls that replay no graph."""
        layout = _Layout(batch.requests)
        block = torch.empty(layout.size, dtype=torch.int32, device=self.device)
        self._copy(layout.pack(batch, batch.tokens), block)
        return StaticBatch(
            batch.tokens, batch.requests, max(2, *batch.new_tokens), max(1, batch.longest), **layout.views(block)
        )

    def _copy(self, words: np.ndarray, block: Tensor) -> None:
        if self.device.type != "cuda":
            block.copy_(torch.from_numpy(words))
            return
        pinned, event = self._pinned(len(words))
        event.synchronize()
        pinned.numpy()[: len(words)] = words
        block.copy_(pinned[: len(words)], non_blocking=True)
        event.record()

    def _pinned(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """The next pinned block of the ring and the event of the copy that last read it."""
        self._turn = (self._turn + 1) % self.RING
        while len(self._ring) < self.RING:
            self._ring.append((torch.empty(0, dtype=torch.int32), None))
        pinned, event = self._ring[self._turn]
        if pinned.numel() < size or event is None:
            if event is not None:
                event.synchronize()
            with torch.inference_mode(False):
                pinned = torch.empty(max(size, 256), dtype=torch.int32, pin_memory=True)
            event = torch.cuda.Event()
            self._ring[self._turn] = (pinned, event)
        return pinned, event

    @staticmethod
    def _poisoned(layout: _Layout, static: StaticBatch, poison: Poison) -> np.ndarray:
        if poison is Poison.IMPOSSIBLE:
            return np.full(layout.size, 2**30, dtype=np.int32)
        # A full batch of nearly equal requests, so that every tail holds live-looking values.
        short, longer = divmod(static.tokens, static.slots)
        lengths = [short + 1] * longer + [short] * (static.slots - longer)
        return layout.pack(PrefillBatch(lengths, device="cpu"), static.tokens)
