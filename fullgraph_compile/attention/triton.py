"""Our own GPU backend: every dtype but fp64, every feature, with and without a KV cache, no package but Triton."""

from __future__ import annotations

import importlib.util
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend, Sentinel
from fullgraph_compile.attention.reasons import no_cuda, too_old
from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.ops import AttentionSite

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD_SIZE = 256

# A prefix of this many keys is what the chunks of few tiles are laid out for: they then fill the device once.
_TYPICAL_PREFIX = 4096
_MIN_CHUNK = 256
_MAX_CHUNKS = 16

# Up to so many rows a launch is all latency, and small tiles have less of it.
_FEW_ROWS = 256


@dataclass(frozen=True)
class KernelConfig:
    """How a site is cut into work, all of it fixed at capture.

    Attributes:
        block_m: rows of a tile; a row is one query head of one token, the heads of one KV head beside each other.
        block_n: keys that are taken at a time.
        warps: warps of a program.
        stages: how many key blocks are in flight.
        chunk: keys of a chunk, where the keys of a tile are split; 0 = never split.
        chunks: most chunks of a tile; requests too long for that get longer ones.
        programs: programs of a launch with split keys, for each multiprocessor; each takes several chunks if there
            are more.
        one_loop: all keys are masked, in one loop; for few rows.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    chunk: int = 0
    chunks: int = 1
    programs: int = 4
    one_loop: bool = False


def choose_config(site: AttentionSite, tokens: int, max_k: int, processors: int, shared_memory: int) -> KernelConfig:
    """The cut for a site in a bucket of ``tokens`` whose requests have at most ``max_k`` keys.

    Args:
        processors: streaming multiprocessors of the device.
        shared_memory: bytes that one program may have.
    """
    rows = tokens * (site.heads // site.kv_heads)
    padded = max(padded_size(site.head_size), padded_size(site.value_head_size))
    wide = site.dtype is torch.float32
    block_m, block_n, stages = (64, 32, 3) if wide or padded > 128 else (64, 64, 3)
    tiles = -(-rows // block_m) * site.kv_heads
    chunk, chunks = 0, 1
    if tiles < processors:
        chunk = max(_MIN_CHUNK, _power(_TYPICAL_PREFIX * tiles // processors))
        chunks = max(2, min(_MAX_CHUNKS, _power(4 * processors // tiles)))
        if max_k <= chunk:
            chunk, chunks = 0, 1
    # As many programs as the registers let run at once.
    programs, one_loop = 4, rows <= _FEW_ROWS
    if one_loop:
        block_m, block_n, stages = 16, 32, 2
        if chunk:  # long keys are then read by as many programs as fit at once
            chunk, programs = max(chunk, 512), 8
    if wide and padded > 128:
        block_m = min(block_m, 32)
    row = padded * site.dtype.itemsize * (2 if wide else 1)  # a wide number is taken as the sum of two
    while stages > 1 and row * (block_m + 2 * block_n * stages) > shared_memory:
        stages -= 1
    return KernelConfig(block_m, block_n, 4, stages, chunk, chunks, programs, one_loop)


def padded_size(size: int) -> int:
    """Head size inside the kernel: a power of two, and no smaller than a matrix instruction takes."""
    return max(16, 1 << (size - 1).bit_length())


def _kind(site: AttentionSite) -> tuple[object, ...]:
    """Sites that are equal here cut their work alike."""
    return site.heads, site.kv_heads, site.head_size, site.value_head_size, site.dtype, site.left, site.right


def _power(n: int) -> int:
    """The power of two that is at least ``n``."""
    return 1 << (max(n, 1) - 1).bit_length()


class TritonAttention(AttentionBackend):
    """A kernel of our own that reads all lengths, offsets and pages on the device.

    It reads keys from the cache of ``static`` through its page table, or from ``k`` and ``v`` where there is no cache.
    Rows past the real total, and rows that see no key, are zeros whatever the inputs hold there.

    Where a bucket has too few tiles to fill the device, long key ranges are split over programs; their parts meet in
    buffers that the backend makes on the first run of a size, before any capture, and keeps: at most
    ``chunks * tokens * heads * (value_head_size + 2)`` floats, some 20 MB for head size 128 on an H200.  All sites
    and all buckets of a body share them, so a body's calls must run in stream order, which they do.
    """

    name: ClassVar[str] = "triton"
    sentinel: ClassVar[Sentinel] = Sentinel()
    paged: ClassVar[bool] = True

    def __init__(self) -> None:
        # Every buffer that a graph may know stays: a larger one is made beside it.
        self._buffers: dict[tuple[torch.device, tuple[object, ...]], list[Tensor]] = {}
        # Of each kind of site the last run: its metadata and the site.
        self._last: dict[tuple[object, ...], tuple[weakref.ref[StaticBatch], int]] = {}

    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        reasons = _device_reasons(device)
        if site.dtype not in _DTYPES:
            reasons.append(f"dtype is {site.dtype}; it computes in float32, float16 and bfloat16")
        for size in sorted({site.head_size, site.value_head_size}):
            if size > _MAX_HEAD_SIZE:
                reasons.append(f"head size {size} is above {_MAX_HEAD_SIZE}")
        if site.heads % site.kv_heads:
            reasons.append(f"{site.heads} query heads are no multiple of {site.kv_heads} key heads")
        return reasons

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        site: AttentionSite,
        static: StaticBatch,
    ) -> Tensor:
        out = q.new_empty(q.shape[0], site.heads, site.value_head_size)
        if not q.shape[0]:
            return out
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        cache, table = static.cache, static.page_table
        if cache is None:
            # Rows of one long page, so to say: requests find theirs by cu_k.
            pages, page_size, max_k = (k[None], v[None]), 0, min(static.max_k, k.shape[0])
        else:
            pages, page_size, max_k = (cache.k[site.index], cache.v[site.index]), cache.page_size, static.max_k
        config = choose_config(site, q.shape[0], max_k, *_device_limits(q.device))
        # Triton launches on the current device, which need not be the model's.
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            self._launch(config, q, *pages, sinks, slopes, out, site, static, table, page_size)
        return out

    def _launch(
        self,
        config: KernelConfig,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        out: Tensor,
        site: AttentionSite,
        static: StaticBatch,
        table: Tensor | None,
        page_size: int,
    ) -> None:
        from fullgraph_compile.attention.triton_kernel import attention_kernel
        from fullgraph_compile.attention.triton_schedule import FIELDS, ITEMS, schedule_kernel

        tokens, heads, group = q.shape[0], site.heads, site.heads // site.kv_heads
        # Each live request has one partly filled tile at most, the fullest of them counted already.
        items = (-(-tokens * group // config.block_m) + min(static.slots, tokens) - 1) * config.chunks
        blocks = -(-items // ITEMS)
        work = self._buffer(("work", *_kind(site)), (blocks * ITEMS + 1) * FIELDS, torch.int32, q.device)
        left, right = max(-1, site.left), max(-1, site.right)
        if self._begins(site, static):
            schedule: Any = schedule_kernel
            schedule[(blocks,)](
                work, static.cu_q, static.cu_k, static.q_lens, static.k_lens, static.table_rows, static.slots,
                config.chunk, config.chunks, LEFT=left, RIGHT=right, GROUP=group, SLOTS=max(16, _power(static.slots)),
                BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPLIT=config.chunk > 0, ITEMS=ITEMS, FIELDS=FIELDS,
            )  # fmt: skip
        programs = items * site.kv_heads
        parts = stats = arrived = None
        if config.chunk:
            programs = min(programs, config.programs * _device_limits(q.device)[0])
            rows = config.chunks * tokens * heads
            parts = self._buffer(("parts",), rows * site.value_head_size, torch.float32, q.device)
            stats = self._buffer(("stats",), rows * 2, torch.float32, q.device)
            arrived = self._buffer(("arrived",), tokens * heads, torch.int32, q.device)
        kernel: Any = attention_kernel
        kernel[(programs,)](
            q, k, v, sinks, slopes, out, parts, stats, arrived, work, static.cu_q, table,
            table.stride(0) if table is not None else 0, tokens, static.slots, tokens * heads, site.scale, site.softcap,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
            LEFT=left, RIGHT=right, SOFTCAP=bool(site.softcap), PAGE_SIZE=page_size,
            KV_HEADS=site.kv_heads, GROUP=group, SIZE=site.head_size, PADDED=padded_size(site.head_size),
            V_SIZE=site.value_head_size, V_PADDED=padded_size(site.value_head_size),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPLIT=config.chunk > 0,
            ONE_LOOP=config.one_loop, PRECISION="tf32x3" if site.dtype is torch.float32 else "ieee", FIELDS=FIELDS,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip

    def _begins(self, site: AttentionSite, static: StaticBatch) -> bool:
        """Whether a run is the first of its kind of site in a pass over the body, which lists the work for all.

        A pass goes through the sites in their order, over one ``static``; so a site that is not after the last one, or
        another ``static``, begins one.
        """
        kind = _kind(site)
        known, index = self._last.get(kind, (None, 0))
        self._last[kind] = weakref.ref(static), site.index
        return known is None or known() is not static or site.index <= index

    def _buffer(self, name: tuple[object, ...], size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least ``size`` cells, zeros when made; the counts among them are zeros again after each launch."""
        known = self._buffers.setdefault((device, name), [])
        if not known or known[-1].numel() < size:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the buffer {name[0]!r} of the triton attention would have to be made inside a capture; "
                    "run each bucket once before it is captured"
                )
            known.append(torch.zeros(size, dtype=dtype, device=device))
        return known[-1]


@cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 132, 232448
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 101376)


def _device_reasons(device: torch.device) -> list[str]:
    if importlib.util.find_spec("triton") is None and device.type == "cuda" and torch.version.hip is None:
        return ["the package triton is not installed"]
    return no_cuda(device) or too_old(device, 8, 0)
