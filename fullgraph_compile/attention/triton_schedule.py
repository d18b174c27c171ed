"""The kernel that lists the work of a call for the backend "triton".  Imported only where Triton is installed.

It runs once for all equal sites of a body, inside the graph: it reads the lengths of all request slots and writes one
record for each tile of queries, or for each chunk of its keys.  So the programs of every site find their work by one
read, and the grids, fixed at capture, serve any batch that fits the bucket: those past the last record leave at once.

How a request is cut depends on that request alone, never on the rest of the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The first record holds the number of the others.
FIELDS = 8
ITEMS = 64


@triton.jit(do_not_specialize=["slots", "min_chunk", "most_chunks"])
def schedule_kernel(
    work, cu_q, cu_k, q_lens, k_lens, table_rows, slots, min_chunk, most_chunks,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    ITEMS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Write the records ``ITEMS * program_id`` and on.

    A record: row of the page table, tile, first query row, queries, keys, chunk, keys of a chunk (0: not cut), first
    key row.
    """
    slot = tl.arange(0, SLOTS)
    here = slot < slots
    q_len = tl.load(q_lens + slot, mask=here, other=0)
    k_len = tl.load(k_lens + slot, mask=here, other=0)
    chunk, chunks = q_len * 0, q_len * 0 + 1
    tiles = tl.cdiv(q_len * GROUP, BLOCK_M)
    if SPLIT:
        span = k_len
        if LEFT >= 0 and RIGHT >= 0:  # a tile sees no more keys than this
            span = tl.minimum(span, LEFT + RIGHT + BLOCK_M // GROUP + 3)
        size = tl.maximum(tl.cdiv(tl.cdiv(span, most_chunks), BLOCK_N) * BLOCK_N, min_chunk)
        chunks = tl.maximum(tl.cdiv(span, size), 1)
        chunk = tl.where(chunks > 1, size, 0)
    units = tiles * chunks
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    if tl.program_id(0) == 0:
        tl.store(work, total)
    number = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    live = number < total
    request = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1)
    mine = slot[None, :] == request[:, None]
    local = number - tl.sum(tl.where(mine, (ends - units)[None, :], 0), 1)
    parts = tl.maximum(tl.sum(tl.where(mine, chunks[None, :], 0), 1), 1)
    record = work + (number + 1) * FIELDS
    if table_rows is None:
        tl.store(record, request, mask=live)
    else:
        tl.store(record, tl.load(table_rows + request, mask=live, other=0).to(tl.int32), mask=live)
    # The last tiles of a causal request have the most keys: they start first.
    tl.store(record + 1, tl.sum(tl.where(mine, tiles[None, :], 0), 1) - 1 - local // parts, mask=live)
    tl.store(record + 2, tl.load(cu_q + request, mask=live, other=0), mask=live)
    tl.store(record + 3, tl.sum(tl.where(mine, q_len[None, :], 0), 1), mask=live)
    tl.store(record + 4, tl.sum(tl.where(mine, k_len[None, :], 0), 1), mask=live)
    tl.store(record + 5, local % parts, mask=live)
    tl.store(record + 6, tl.sum(tl.where(mine, chunk[None, :], 0), 1), mask=live)
    tl.store(record + 7, tl.load(cu_k + request, mask=live, other=0), mask=live)
