"""What FlashInfer's kernels are told before each call: lengths from the host, in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.pinned import PinnedRing

# Offsets into the work lists are int32.
_MOST_KEYS = 2**31 - 1


@dataclass(frozen=True)
class PlanKey:
    """What a plan and a built module depend on; sites that are alike share both.

    Attributes:
        kernels: "fa2" or "fa3".
        window: keys to the left of a query, besides its own; -1 = all.
        page_size: tokens of a page; 0 = keys are arguments.
    """

    kernels: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    causal: bool
    window: int
    softcap: bool
    slopes: bool
    page_size: int

    @classmethod
    def of(cls, site: AttentionSite, kernels: str, static: StaticBatch) -> PlanKey:
        return cls(
            kernels, site.dtype, site.heads, site.kv_heads, site.head_size, site.value_head_size, site.causal,
            max(-1, site.left), bool(site.softcap), site.slopes, 0 if static.cache is None else static.cache.page_size,
        )  # fmt: skip


class HostOffsets:
    """Offsets and lengths of a batch, as int32 tensors on the CPU, so that planning reads nothing from the device.

    Unused slots hold no tokens.  One more request, the last, holds the padded rows and has no keys: FlashInfer does
    not write rows of no request, and zeros for a request without keys.
    """

    def __init__(self, batch: PrefillBatch, static: StaticBatch) -> None:
        unused = static.slots - batch.requests
        self.requests = static.slots + 1
        self._lengths = [*batch.lengths, *[0] * (unused + 1)]
        self._new = [*batch.new_tokens, *[0] * unused, static.tokens - batch.tokens]
        self._columns = 0 if static.page_table is None else static.page_table.shape[1]

    @cached_property
    def q_indptr(self) -> Tensor:
        """``[R + 2]``: where each request's rows start; the last entry is the bucket."""
        return _int32([0, *accumulate(self._new)])

    @cached_property
    def k_lens(self) -> Tensor:
        """``[R + 1]``: keys of each request."""
        return _int32(self._lengths)

    def kv_indptr(self, key: PlanKey) -> Tensor:
        """``[R + 2]``: where each request's keys start: in key rows; or, with pages, in pages.

        FA2's planner reads page counts from it; FA3's kernels find a request's row of the page table by it, so there
        it counts all cells of a row.
        """
        if not key.page_size:
            counts = self._lengths
        elif key.kernels == "fa2":
            counts = [-(-n // key.page_size) for n in self._lengths]
        else:
            counts = [*[self._columns] * (self.requests - 1), 0]
        return _int32([0, *accumulate(counts)])


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class FloatWorkspaces:
    """The memory for parts of split requests, shared by all plans, as calls run in stream order.

    What a graph knows stays at its address: where a plan needs more, a larger one is made beside it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: list[Tensor] = []

    def of(self, size: int) -> Tensor:
        """At least ``size`` bytes.

        Raises:
            RuntimeError: they would have to be made inside a capture.
        """
        for made in self._made:
            if made.numel() >= size:
                return made
        refuse_in_capture(self.device, "its workspace would have to be made")
        with torch.inference_mode(False):
            made = torch.empty(max(16, size), dtype=torch.uint8, device=self.device)
        self._made = sorted([*self._made, made], key=Tensor.numel)
        return made


def refuse_in_capture(device: torch.device, what: str) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"flashinfer attention: {what} inside a capture; plan each bucket once before it is captured"
        )


class PageTables:
    """The pages of a call in the form that FlashInfer wants, at fixed addresses.

    NOTE: FlashInfer counts a request's keys as (pages - 1) * page_size + keys on the last page.  Here every request has
    a whole row of the page table for its pages, so that the table is read where it was staged; the keys on its "last
    page" are what makes the sum right, and mostly negative.

    Attributes:
        indices: ``[R * P]`` int32, the page table.
        indptr: ``[R + 2]`` int32, where each request's row starts; the request of padded rows, the last, has no pages.
        on_last_page: ``[R + 1]`` int32.
    """

    def __init__(self, static: StaticBatch) -> None:
        assert static.cache is not None and static.page_table is not None
        device, slots = static.cu_q.device, static.slots
        columns, page_size = static.page_table.shape[1], static.cache.page_size
        if slots * columns * page_size > _MOST_KEYS:
            raise ValueError(
                f"flashinfer attention counts keys in int32, but {slots} request slots of {columns} pages of "
                f"{page_size} tokens are more than {_MOST_KEYS}; use fewer slots or a shorter context"
            )
        if not static.page_table.is_contiguous():
            raise ValueError("flashinfer attention reads a contiguous page table only")
        self._k_lens = static.k_lens
        self._before_last = (columns - 1) * page_size
        with torch.inference_mode(False):
            self.indices = static.page_table.view(-1)
            self.indptr = torch.arange(slots + 2, dtype=torch.int32, device=device).clamp_(max=slots).mul_(columns)
            self.on_last_page = torch.zeros(slots + 1, dtype=torch.int32, device=device)

    def update(self) -> None:
        """Follow what was staged, on the device."""
        torch.sub(self._k_lens, self._before_last, out=self.on_last_page[: self._k_lens.shape[0]])


class Plan:
    """The plan of the sites of one key in one bucket (or one call at exact size), and the memory that it fills.

    NOTE: In a graph the kernels' addresses and grids were fixed by the plan before the capture, so each later one must
    come to the same; it does if all sizes follow from the bucket, and that is checked.

    Args:
        module: FlashInfer's functions, built for the key.
        more: what the planner of this FlashInfer takes besides, at the end.
        graph: whether a graph will keep the plan's sizes.
    """

    def __init__(
        self, key: PlanKey, module: Any, more: tuple[Any, ...], static: StaticBatch, host: HostOffsets, *, graph: bool,
        floats: FloatWorkspaces, ring: PinnedRing,
    ) -> None:  # fmt: skip
        self.key, self.module, self.graph = key, module, graph
        self._more = more if key.kernels == "fa2" else ()
        self._tokens = static.tokens
        self._ring = ring
        refuse_in_capture(floats.device, "a plan would have to be made")
        float_bytes, int_bytes = self._sizes(host, floats)
        self.floats = floats.of(float_bytes)
        with torch.inference_mode(False):
            self.ints = torch.empty(int_bytes, dtype=torch.uint8, device=floats.device)
        ring.reserve(int_bytes)
        self.info: Any = None
        self._fixed: list[int] | None = None

    def update(self, host: HostOffsets) -> None:
        """Plan a batch: lists of tiles, copied to the device on the current stream."""
        info = self.module.plan(self.floats, self.ints, self._ring.take().bytes, *self._arguments(host))
        values = [int(x) for x in info]
        if self.graph and self._fixed not in (None, values):
            raise RuntimeError(
                f"flashinfer planned bucket {self._tokens} as {values}, but its graph was captured with {self._fixed}"
            )
        self.info, self._fixed = info, values

    def _arguments(self, host: HostOffsets) -> tuple[Any, ...]:
        k = self.key
        return (
            host.q_indptr, host.kv_indptr(k), host.k_lens, self._tokens, host.requests, k.heads, k.kv_heads,
            k.page_size or 1, self.graph, k.head_size, k.value_head_size, k.causal, k.window, *self._more,
        )  # fmt: skip

    def _sizes(self, host: HostOffsets, floats: FloatWorkspaces) -> tuple[int, int]:
        """Bytes of the float and of the int workspace.  In a graph they follow from the bucket alone."""
        if self.key.kernels == "fa2":
            # Any tensor that names the device.
            sizes = self.module.workspace_size(floats.of(16), *self._arguments(host))
            return int(sizes[0]) + _SPARE, int(sizes[1]) + _SPARE
        return 16, fa3_int_bytes(self._tokens, host.requests, self.key, _processors(floats.device))


# Room for the start of a workspace to be aligned.
_SPARE = 256


def fa3_int_bytes(tokens: int, requests: int, key: PlanKey, processors: int) -> int:
    """Bytes of FA3's lists: seven words for each tile of each head, and one for each multiprocessor.

    A tile is 192 rows for head size 64, else 128; each request has at most one that is partly filled.
    """
    tiles = -(-tokens // (192 if key.value_head_size == 64 else 128)) + requests - 1
    # From so many tiles on, all heads share one list; room for one of each is more than enough.
    works = tiles * key.heads
    return 7 * _aligned(4 * works) + _aligned(4 * (processors + 1)) + _SPARE


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(device: torch.device) -> Any:
    """FlashInfer works on the current device, which need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
