"""Staging: one block, one copy, and every word of the metadata rewritten at every replay."""

from __future__ import annotations

import enum
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.pinned import WordCopier
from fullgraph_compile.views import Views

if TYPE_CHECKING:
    from fullgraph_compile.cache import PagedKVCache


class Poison(enum.Enum):
    """What tests fill the static buffers with before each staging, so that a word which is not rewritten shows.

    Impossible values hide some faults (an offset past the end reads as "no more requests"), so there is a
    plausible dress too: the metadata of another legal batch.
    """

    IMPOSSIBLE = "impossible"
    PLAUSIBLE = "plausible"


# Each vector starts at a multiple of 16 bytes, so that a kernel compiled for one bucket's addresses fits all.
_ALIGNED = 4
# Requests whose metadata a bucket keeps: some kilobytes each where there are many slots.
_MOST_KEPT = 1024


@dataclass(frozen=True)
class _Layout:
    """Where each vector lies in a block of int32: addresses, slot ids, lengths and offsets, then the page table.

    ``cu_q`` and ``cu_k`` are what ``pad_cu_q`` and ``pad_cu_k`` begin with.

    ``pack`` writes the vectors in the order of ``parts``.

    Attributes:
        tokens: rows of the call.
        slots: request slots.
        max_k: bound of cached and new tokens of a request.
        page_size: tokens in a page of the KV cache; 0 = no cache.
        addresses: how many come first: of what a call gives and gets.
    """

    tokens: int
    slots: int
    max_k: int
    page_size: int = 0
    addresses: int = 0

    @property
    def columns(self) -> int:
        """Row stride of the page table."""
        return -(-self.max_k // self.page_size) if self.page_size else 0

    @cached_property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each vector before the page table, in int32 words."""
        s = self.slots
        return (
            *((("addresses", 2 * self.addresses),) if self.addresses else ()),
            *((("slot_ids", 2 * self.tokens),) if self.page_size else ()),
            ("num_real_tokens", 1), ("q_lens", s), ("k_lens", s), ("pad_cu_q", s + 2), ("pad_cu_k", s + 2),
        )  # fmt: skip

    @cached_property
    def head(self) -> int:
        """Words before the page table."""
        return sum(_aligned(n) for _, n in self.parts)

    @cached_property
    def front(self) -> struct.Struct:
        """The addresses as ``front.pack`` writes them."""
        return struct.Struct(f"={self.addresses}q{4 * _aligned(2 * self.addresses) - 8 * self.addresses}x")

    @property
    def size(self) -> int:
        return self.head + self.slots * self.columns

    def views(self, block: Tensor) -> dict[str, Tensor]:
        views, at = {}, 0
        for name, n in self.parts:
            views[name] = block[at : at + n]
            at += _aligned(n)
        for name in ("cu_q", "cu_k"):
            views[name] = views[f"pad_{name}"][:-1]
        views.pop("addresses", None)  # nothing that attention reads
        if self.page_size:
            views["slot_ids"] = views["slot_ids"].view(torch.int64)
            views["page_table"] = block[at : at + self.slots * self.columns].view(self.slots, self.columns)
        return views

    @cached_property
    def _gaps(self) -> list[bytes]:
        """What is behind each vector of int32 before the page table."""
        return [bytes(4 * (_aligned(n) - n)) for name, n in self.parts if name not in ("addresses", "slot_ids")]

    def pack(self, batch: PrefillBatch, rows: int, addresses: Sequence[int]) -> bytearray:
        """Addresses and all metadata of a batch, tails included, and the first ``rows`` rows of the page table.

        Bytes are put together at the cost of one array; this is before each launch.
        """
        front, vectors = self.front.pack(*addresses), self._vectors(batch)
        if not self.page_size:
            return bytearray().join((front, vectors))
        slot_ids = np.zeros(_aligned(2 * self.tokens) // 2, dtype=np.int64)
        table = np.zeros((rows, self.columns), dtype=np.int32)
        self._pack_pages(batch, slot_ids, table)
        return bytearray().join((front, slot_ids.tobytes(), vectors, table.tobytes()))

    def _vectors(self, batch: PrefillBatch) -> bytes:
        """Lengths and offsets."""
        # Of one request without a prefix only its length is to be known.
        alone = batch.requests == 1 and not batch.cached_tokens[0]
        if alone and batch.tokens in self._of_one:
            return self._of_one[batch.tokens]
        unused = self.slots - batch.requests
        new, starts_q, keys, starts_k = batch.words
        total_q, total_k, zeros = starts_q[-4:], starts_k[-4:], bytes(4 * unused)
        last = self.tokens.to_bytes(4, sys.byteorder)
        a, b, c, d, e = self._gaps
        q, k = (starts_q, total_q * unused, last), (starts_k, total_k * (unused + 1))
        vectors = b"".join((total_q, a, new, zeros, b, keys, zeros, c, *q, d, *k, e))
        if alone:
            if len(self._of_one) >= _MOST_KEPT:
                self._of_one.clear()
            self._of_one[batch.tokens] = vectors
        return vectors

    @cached_property
    def _of_one(self) -> dict[int, bytes]:
        """Vectors of one request without a prefix, by its tokens."""
        return {}

    def _pack_pages(self, batch: PrefillBatch, slot_ids: np.ndarray, table: np.ndarray) -> None:
        """Both hold zeros, which is reserved page 0."""
        if batch.pages is None:
            # A batch of the capture: no page is its own, so nothing is written.
            slot_ids[: batch.tokens] = -1
            return
        for row, pages, length in zip(table, batch.pages, batch.lengths, strict=False):
            used = -(-length // self.page_size)
            row[:used] = pages[:used]
        request = np.repeat(np.arange(batch.requests), batch.new_tokens)
        page, offset = np.divmod(batch.host_positions, self.page_size)
        slot_ids[: batch.tokens] = table[request, page].astype(np.int64) * self.page_size + offset


def metadata_bytes(
    buckets: Sequence[tuple[int, int]], max_k: int, cache: PagedKVCache | None, addresses: int = 0
) -> int:
    """What ``StaticBuffers`` of these buckets takes on the device."""
    page_size = 0 if cache is None else cache.page_size
    return 4 * _block_words([_Layout(tokens, slots, max_k, page_size, addresses) for tokens, slots in buckets])[1]


def _block_words(layouts: Sequence[_Layout]) -> tuple[int, int]:
    """Words before the page table, and in all, of one block for all layouts."""
    head = max((layout.head for layout in layouts), default=0)
    table = max((layout.slots * layout.columns for layout in layouts), default=0)
    return head, head + table


def _aligned(words: int) -> int:
    return -(-words // _ALIGNED) * _ALIGNED


class StaticBuffers:
    """Owns the metadata that captured graphs read, at fixed addresses.

    All buckets share one block, as calls run in stream order.  The page table lies at one place in it for all of
    them, and the vectors of a bucket right before it, so that what a call stages is always one piece of memory.

    Args:
        buckets: (tokens, request slots) of each; the tokens also bound the new tokens of a request.
        max_k: bound of cached and new tokens of a request.
        cache: the KV cache that the graphs read and write, or None.
        addresses: how many are staged with a call.
    """

    def __init__(
        self,
        device: torch.device,
        buckets: Sequence[tuple[int, int]],
        max_k: int,
        cache: PagedKVCache | None = None,
        addresses: int = 0,
    ) -> None:
        self.device = device
        page_size = 0 if cache is None else cache.page_size
        layouts = [_Layout(tokens, slots, max_k, page_size, addresses) for tokens, slots in buckets]
        head, size = _block_words(layouts)
        with torch.inference_mode(False):
            self._block = torch.zeros(size, dtype=torch.int32, device=device)
        self.staged: StaticBatch | None = None  # of the bucket that the shared block is laid out for
        self._copier = WordCopier(device)
        self._copier.reserve(size)
        self._dirty = 0  # rows of the page table that hold what the last call staged
        self._no_addresses = (0,) * addresses
        self._buckets: dict[int, tuple[_Layout, Views, StaticBatch]] = {}
        for layout in layouts:
            block = self._block[head - layout.head :]
            static = _static(layout, block, max(2, layout.tokens), cache)
            self._buckets[layout.tokens] = (layout, Views(block), static)

    def of(self, tokens: int) -> StaticBatch:
        """The metadata of bucket ``tokens``."""
        return self._buckets[tokens][2]

    def addresses_of(self, tokens: int) -> Tensor:
        """The addresses that bucket ``tokens`` was staged with: int64."""
        layout, block, _ = self._buckets[tokens]
        return block.tensor[: 2 * layout.addresses].view(torch.int64)

    def stage(
        self, batch: PrefillBatch, tokens: int, poison: Poison | None = None, addresses: Sequence[int] = ()
    ) -> StaticBatch:
        """Write a batch into the metadata of bucket ``tokens``, on the current stream, without waiting.

        Args:
            addresses: of what the call gives and gets, each 0 where there is none; empty = there are none at all.

        The batch is checked against the bounds that the bucket's kernels got at capture; one outside of them is an
        error here, as it would read out of bounds there.
        """
        layout, block, static = self._buckets[tokens]
        if batch.tokens > static.tokens or batch.requests > static.slots or batch.longest > static.max_k:
            raise ValueError(
                f"{batch!r}, longest {batch.longest}, does not fit bucket {static.tokens} with {static.slots} "
                f"request slots and {static.max_k} tokens a request"
            )
        if poison is not None:
            words = _poisoned(layout, static, poison)
            self._copier.copy(words, block.first(len(words) // 4))
            self._dirty = max(self._dirty, layout.slots)
        rows = max(batch.requests, min(self._dirty, layout.slots)) if layout.page_size else 0
        words = layout.pack(batch, rows, addresses or self._no_addresses)
        self._copier.copy(words, block.first(len(words) // 4))
        # Rows past the slots of this bucket stay as a larger one left them.
        self._dirty = max(batch.requests, self._dirty) if self._dirty > layout.slots else batch.requests
        self.staged = static
        return static


class ExactBuffers:
    """Metadata of batches at their exact size, in memory of their own: for calls that replay no graph."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copier = WordCopier(device)

    def stage(self, batch: PrefillBatch) -> StaticBatch:
        """Metadata of a batch, on the current stream, without waiting."""
        page_size = 0 if batch.cache is None else batch.cache.page_size
        layout = _Layout(batch.tokens, batch.requests, max(1, batch.longest), page_size)
        block = torch.empty(layout.size, dtype=torch.int32, device=self.device)
        self._copier.copy(layout.pack(batch, batch.requests, ()), block)
        return _static(layout, block, max(2, *batch.new_tokens), batch.cache)


def _static(layout: _Layout, block: Tensor, max_q: int, cache: PagedKVCache | None) -> StaticBatch:
    views: dict[str, Any] = layout.views(block)
    return StaticBatch(layout.tokens, layout.slots, max_q, layout.max_k, cache=cache, **views)


def _poisoned(layout: _Layout, static: StaticBatch, poison: Poison) -> bytearray:
    # There is no plausible address, and none that may be read or written.
    addresses = (0,) * layout.addresses
    if poison is Poison.IMPOSSIBLE:
        front = layout.front.pack(*addresses)
        return bytearray(front) + np.full(layout.size - len(front) // 4, 2**30, dtype=np.int32).tobytes()
    # A full batch of nearly equal requests over pages that exist, so that every tail holds live-looking values.
    short, longer = divmod(static.tokens, static.slots)
    batch = PrefillBatch([short + 1] * longer + [short] * (static.slots - longer), device="cpu")
    if static.cache is not None:
        pages, most = static.cache.pages - 1, max(1, layout.columns)
        batch.cache, batch.pages = (
            static.cache,
            [[1 + (r * most + i) % pages for i in range(most)] for r in range(static.slots)],
        )
    return layout.pack(batch, static.slots, addresses)
