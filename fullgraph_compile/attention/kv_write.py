"""Writing the new keys and values of one site into the pages of the KV cache, in one launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.ops import AttentionSite

# Elements of K, and as many of V, that one program of the kernel holds in registers.
_ELEMENTS = 2048

# Triton's language, as the kernel below names it.  Set when the kernel is first made, as a machine without Triton has
# none.
tl: Any = None


def write_site(k: Tensor, v: Tensor, site: AttentionSite, static: StaticBatch) -> None:
    """Write the new rows of one site into the cache of a batch, which has one."""
    assert static.cache is not None and static.slot_ids is not None
    write_kv(k, v, static.cache.k[site.index], static.cache.v[site.index], static.slot_ids, static.num_real_tokens)


@torch.no_grad()
def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_ids: Tensor, num_real_tokens: Tensor) -> None:
    """Write the new rows of K and V to their slots.

    Reads nothing on the host, so that it can be captured: how many rows are real is read on the device.  A row past
    the real total, and a row whose slot is not in the pool (-1, as some engines mark padding), changes no slot of a
    request, whatever it holds.  With index ops (anywhere but on CUDA) such a row writes zeros to slot 0, which is in
    reserved page 0; the kernel skips it.  So page 0 stays zero, and what reads it through an unused cell of the page
    table meets no NaN.

    Args:
        k: ``[rows, kv_heads, head_size]``, any strides, but a copy is made if its last dim is not contiguous.
        v: ``[rows, kv_heads, value_head_size]``, likewise.
        k_pages: ``[pages, page_size, kv_heads, head_size]``, dtype and device of ``k``; pages one after another in
            memory, last dim contiguous.
        v_pages: ``[pages, page_size, kv_heads, value_head_size]``, likewise.
        slot_ids: ``[at least the real total]`` int64 or int32: page * page_size + offset in the page.
        num_real_tokens: ``[1]`` int32, the real total.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit together.
    """
    k_slots, v_slots = _slots("k_pages", k_pages), _slots("v_pages", v_pages)
    _check("k", k, "k_pages", k_pages)
    _check("v", v, "v_pages", v_pages)
    if k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1] or k_slots.shape[0] != v_slots.shape[0]:
        raise ValueError(
            f"K and V differ in more than head size: k is {_of(k)}, v {_of(v)}, k_pages {_of(k_pages)}, "
            f"v_pages {_of(v_pages)}"
        )
    if slot_ids.dim() != 1 or slot_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"slot_ids is {_of(slot_ids)} of {slot_ids.dtype}; it must be [tokens] of int64 or int32")
    if num_real_tokens.numel() != 1:
        raise ValueError(f"num_real_tokens is {_of(num_real_tokens)}; it must be one number")
    # Real rows come first, so one padded length beside an unpadded one cuts none of them.
    rows = min(k.shape[0], slot_ids.shape[0])
    if rows == 0:
        return
    if k.device.type == "cuda" and _kernel() is not None:
        # Triton launches on the current device, which need not be the model's.
        with torch.cuda.device(k.device):
            _launch(rows, k, v, k_slots, v_slots, slot_ids, num_real_tokens)
    else:
        _index(rows, k, v, k_slots, v_slots, slot_ids, num_real_tokens)


def _index(
    rows: int, k: Tensor, v: Tensor, k_slots: Tensor, v_slots: Tensor, slot_ids: Tensor, num_real_tokens: Tensor
) -> None:
    """The same shapes whatever the values: each row is written somewhere."""
    slots = slot_ids[:rows]
    skipped = torch.arange(rows, device=k.device) >= num_real_tokens
    skipped = skipped | (slots < 0) | (slots >= k_slots.shape[0])
    slots = slots.long().masked_fill(skipped, 0)
    for new, pool in ((k, k_slots), (v, v_slots)):
        pool.index_copy_(0, slots, new[:rows].masked_fill(skipped[:, None, None], 0))


def _launch(
    rows: int, k: Tensor, v: Tensor, k_slots: Tensor, v_slots: Tensor, slot_ids: Tensor, num_real_tokens: Tensor
) -> None:
    """One program for each row, or for some of a row's heads where they are many."""
    k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (k, v))
    heads, k_size, v_size = k.shape[1], k.shape[2], v.shape[2]
    k_block, v_block = _power_of_2(k_size), _power_of_2(v_size)
    widest = max(k_block, v_block)
    head_block = min(_power_of_2(heads), max(1, _ELEMENTS // widest))
    _kernel()[(rows, -(-heads // head_block))](
        k, v, k_slots, v_slots, slot_ids, num_real_tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_slots.stride(0), k_slots.stride(1), v_slots.stride(0), v_slots.stride(1),
        slot_ids.stride(0), k_slots.shape[0],
        HEADS=heads, K_SIZE=k_size, V_SIZE=v_size, HEAD_BLOCK=head_block, K_BLOCK=k_block, V_BLOCK=v_block,
        num_warps=min(4, max(1, head_block * widest // 256)),
    )  # fmt: skip


@functools.cache
def _kernel() -> Any:
    """The compiled kernel, or None where Triton is not installed."""
    global tl
    try:
        import triton
        import triton.language
    except ImportError:
        return None
    tl = triton.language
    return triton.jit(_write_row)


def _write_row(
    k,
    v,
    k_slots,
    v_slots,
    slot_ids,
    num_real_tokens,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    k_slot_stride,
    k_slot_head_stride,
    v_slot_stride,
    v_slot_head_stride,
    slot_id_stride,
    slots,
    HEADS: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    # Offsets are 64 bits wide: a pool may hold more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)).to(tl.int64)[:, None]
    k_column = tl.arange(0, K_BLOCK)[None, :]
    v_column = tl.arange(0, V_BLOCK)[None, :]
    k_inside = (head < HEADS) & (k_column < K_SIZE)
    v_inside = (head < HEADS) & (v_column < V_SIZE)
    # Every load is on its way before any is waited for: padded rows exist, so loading one is harmless, and a short
    # prefill waits for one trip to memory, not for two.
    k_row = tl.load(k + row * k_row_stride + head * k_head_stride + k_column, mask=k_inside)
    v_row = tl.load(v + row * v_row_stride + head * v_head_stride + v_column, mask=v_inside)
    slot = tl.load(slot_ids + row * slot_id_stride).to(tl.int64)
    real = tl.load(num_real_tokens)
    written = (row < real) & (slot >= 0) & (slot < slots)
    tl.store(k_slots + slot * k_slot_stride + head * k_slot_head_stride + k_column, k_row, mask=k_inside & written)
    tl.store(v_slots + slot * v_slot_stride + head * v_slot_head_stride + v_column, v_row, mask=v_inside & written)


def _slots(name: str, pages: Tensor) -> Tensor:
    """``[pages * page_size, kv_heads, size]`` on the same memory."""
    if pages.dim() != 4:
        raise ValueError(f"{name} is {_of(pages)}; it must be [pages, page_size, kv_heads, head size]")
    count, page_size, heads, size = pages.shape
    try:
        slots = pages.view(count * page_size, heads, size)
    except RuntimeError:
        slots = None
    if slots is None or (size > 1 and slots.stride(-1) != 1):
        raise ValueError(
            f"{name} has strides {pages.stride()} for {_of(pages)}; its pages must lie one after another in memory, "
            "and its last dim must be contiguous"
        )
    return slots


def _check(name: str, new: Tensor, pages_name: str, pages: Tensor) -> None:
    if new.dim() != 3 or new.shape[1:] != pages.shape[2:]:
        raise ValueError(
            f"{name} is {_of(new)}, {pages_name} holds {pages.shape[2]} heads of {pages.shape[3]}; "
            "give the cache the geometry of the site"
        )
    if new.dtype != pages.dtype or new.device != pages.device:
        raise ValueError(
            f"{name} is {new.dtype} on {new.device}, {pages_name} is {pages.dtype} on {pages.device}; "
            "they must be equal"
        )


def _of(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}"


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
