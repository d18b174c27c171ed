"""The kernel behind the backend "triton".  Imported only where Triton is installed.

A program finds its work in the records that ``triton_schedule`` wrote for the call.  The query heads that share a KV
head are rows of one tile (row = token * group + head within the group), so that few tokens fill a tile and a group
reads its keys once.

Where tiles are few and keys may be many (``SPLIT``), the keys of a tile are cut in chunks of which each is one unit of
work.  A tile with one chunk is written right away; else each chunk leaves its part in a buffer, and the program that
comes last adds them up in the order of the chunks, whoever that program is.

With few rows all keys are taken by one masked loop (``ONE_LOOP``): it is the length of the code, not what it computes,
that a short launch waits for.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _zero_rows(out, first, end, BLOCK: tl.constexpr):
    """Zero ``out[first:end]``, all programs together."""
    step = tl.num_programs(0) * BLOCK
    for at in range(first + tl.program_id(0) * BLOCK, end, step):
        cells = at + tl.arange(0, BLOCK)
        tl.store(out + cells, tl.zeros([BLOCK], out.dtype.element_ty), mask=cells < end)


@triton.jit
def _load_keys(base, row, columns, live, MASKED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """``[BLOCK_N, PADDED]`` of keys or values; zeros, never memory, where there is no live key or no element."""
    pointers = base + row[:, None] + columns[None, :]
    if MASKED and PADDED != SIZE:
        tile = tl.load(pointers, mask=live[:, None] & (columns < SIZE)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=live[:, None], other=0.0)
    elif PADDED != SIZE:
        tile = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _attend(
    acc, top, total, q, k, v, table, start, stop, first, end, own, slope, scale, softcap,
    k_page, k_row, v_page, v_row,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, V_SIZE: tl.constexpr, V_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys ``start <= j < stop`` of one request into (acc, top, total).

    Unless ``MASKED``, every row sees all of them and their number is a multiple of ``BLOCK_N``.
    """
    columns, v_columns = tl.arange(0, PADDED), tl.arange(0, V_PADDED)
    # Page ids are read a block ahead: a chain of two reads in one turn would halve what is in flight.
    page = tl.zeros([BLOCK_N], tl.int32)
    if PAGE_SIZE > 0:
        j = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + j // PAGE_SIZE, mask=j < stop, other=0)
    for at in range(start, stop, BLOCK_N):
        j = at + tl.arange(0, BLOCK_N)
        live = j < stop
        if PAGE_SIZE > 0:
            k_at = page.to(tl.int64) * k_page + (j % PAGE_SIZE) * k_row
            v_at = page.to(tl.int64) * v_page + (j % PAGE_SIZE) * v_row
            page = tl.load(table + (j + BLOCK_N) // PAGE_SIZE, mask=j + BLOCK_N < stop, other=0)
        else:
            k_at = j * k_row
            v_at = j * v_row
        keys = _load_keys(k, k_at, columns, live, MASKED, SIZE, PADDED)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        # Scores are kept times log2(e): exp2 is the instruction that there is.
        if SOFTCAP:
            # tanh by way of a power that goes to 0, not to infinity.
            capped = scores * (scale / softcap)
            power = tl.exp2(tl.abs(capped) * (-2.0 * LOG2E))
            size = (1.0 - power) / (1.0 + power) * (softcap * LOG2E)
            scores = tl.where(capped < 0, -size, size)
            scores = tl.where(capped == capped, scores, capped)
        else:
            scores = scores * (scale * LOG2E)
        if SLOPES:
            scores += slope[:, None] * (j[None, :] - own[:, None]).to(tl.float32)
        if MASKED:
            seen = (j[None, :] >= first[:, None]) & (j[None, :] < end[:, None]) & live[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet: -inf less -inf would be NaN.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        values = _load_keys(v, v_at, v_columns, live, MASKED, V_SIZE, V_PADDED)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        top = highest
    return acc, top, total


@triton.jit
def _finish(out, sinks, acc, top, total, row, head, valid, columns, V_SIZE: tl.constexpr):
    """Divide by the weights' sum, the sink's weight in it, and write; zeros in rows that saw no key."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        # A sink far above all scores makes this infinite, which leaves the row 0, as it should be.
        total += tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))
    empty = top == float("-inf")
    result = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    mask = valid[:, None] & (columns < V_SIZE)[None, :]
    tl.store(out + row[:, None] * V_SIZE + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _work(
    head, request, tile, q_start, q_len, k_len, here, chunk, k_start,
    q, k, v, sinks, slopes, out, parts, stats, arrived, page_table, table_row, part_rows, scale, softcap,
    q_token, q_head, k_page, k_row, k_head, v_page, v_row, v_head,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    V_SIZE: tl.constexpr, V_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, ONE_LOOP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one request and KV head, or one chunk of its keys."""
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, query_head = m // GROUP, head * GROUP + m % GROUP
    valid = token < q_len
    own = token + (k_len - q_len)
    low_own = tile * BLOCK_M // GROUP + (k_len - q_len)
    high_own = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1) + (k_len - q_len)

    # What each row sees (first, end), what some row of the tile sees (low, high), and what all see (in between).
    first, end = tl.zeros_like(own), tl.zeros_like(own) + k_len
    low, high = low_own * 0, k_len
    all_low, all_high = low, high
    if LEFT >= 0:
        first = tl.maximum(own - LEFT, 0)
        low, all_low = tl.maximum(low_own - LEFT, 0), tl.maximum(high_own - LEFT, 0)
    if RIGHT >= 0:
        end = tl.minimum(own + RIGHT + 1, k_len)
        high, all_high = tl.minimum(high_own + RIGHT + 1, k_len), tl.minimum(low_own + RIGHT + 1, k_len)
    end = tl.where(valid, end, 0)

    active = here * 0 + 1
    if SPLIT:
        # A tile that sees fewer keys than its request has may have fewer chunks.
        chunk = tl.where(chunk > 0, chunk, tl.maximum(k_len, 1))
        active = tl.maximum(tl.cdiv(high - low, chunk), 1)
        low += here * chunk
        high = tl.minimum(high, low + chunk)
    if here < active:
        columns = tl.arange(0, PADDED)
        row = q_start.to(tl.int64) + token
        q_mask = valid[:, None] & (columns < SIZE)[None, :]
        q_at = q + row[:, None] * q_token + query_head[:, None] * q_head + columns[None, :]
        queries = tl.load(q_at, mask=q_mask, other=0.0)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if slopes is not None:
            slope = tl.load(slopes + query_head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        SLOPES: tl.constexpr = slopes is not None
        k += head * k_head
        v += head * v_head
        table = page_table
        if PAGE_SIZE > 0:
            table += request.to(tl.int64) * table_row
        else:
            k += k_start.to(tl.int64) * k_row
            v += k_start.to(tl.int64) * v_row

        acc = tl.zeros([BLOCK_M, V_PADDED], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if ONE_LOOP:
            acc, top, total = _attend(
                acc, top, total, queries, k, v, table, low, high, first, end, own, slope, scale, softcap,
                k_page, k_row, v_page, v_row, True, SOFTCAP, SLOPES, PAGE_SIZE, SIZE, PADDED, V_SIZE, V_PADDED,
                BLOCK_N, PRECISION,
            )  # fmt: skip
        else:
            # Keys that some row does not see are taken in smaller blocks: a short request has no others.
            EDGE: tl.constexpr = BLOCK_N if BLOCK_N < 32 else 32
            inner = low
            if LEFT >= 0:
                inner = tl.minimum(low + tl.cdiv(tl.maximum(all_low - low, 0), EDGE) * EDGE, tl.maximum(high, low))
                acc, top, total = _attend(
                    acc, top, total, queries, k, v, table, low, inner, first, end, own, slope, scale, softcap,
                    k_page, k_row, v_page, v_row, True, SOFTCAP, SLOPES, PAGE_SIZE, SIZE, PADDED, V_SIZE, V_PADDED,
                    EDGE, PRECISION,
                )  # fmt: skip
            edge = inner + tl.maximum(tl.minimum(all_high, high) - inner, 0) // BLOCK_N * BLOCK_N
            if edge > inner:  # beside a loop of no turns stands what it reads ahead
                acc, top, total = _attend(
                    acc, top, total, queries, k, v, table, inner, edge, first, end, own, slope, scale, softcap,
                    k_page, k_row, v_page, v_row, False, SOFTCAP, SLOPES, PAGE_SIZE, SIZE, PADDED, V_SIZE, V_PADDED,
                    BLOCK_N, PRECISION,
                )  # fmt: skip
            if high > edge:
                acc, top, total = _attend(
                    acc, top, total, queries, k, v, table, edge, high, first, end, own, slope, scale, softcap,
                    k_page, k_row, v_page, v_row, True, SOFTCAP, SLOPES, PAGE_SIZE, SIZE, PADDED, V_SIZE, V_PADDED,
                    EDGE, PRECISION,
                )  # fmt: skip

        out_row = row * (KV_HEADS * GROUP) + query_head
        v_columns = tl.arange(0, V_PADDED)
        if not SPLIT:  # noqa: SIM114  (the other branches must not be compiled then)
            _finish(out, sinks, acc, top, total, out_row, query_head, valid, v_columns, V_SIZE)
        elif active == 1:
            _finish(out, sinks, acc, top, total, out_row, query_head, valid, v_columns, V_SIZE)
        else:
            V_STEP: tl.constexpr = V_PADDED if V_PADDED < 32 else 32
            part_mask = valid[:, None] & (v_columns < V_SIZE)[None, :]
            part_row = here.to(tl.int64) * part_rows + out_row
            tl.store(parts + part_row[:, None] * V_SIZE + v_columns[None, :], acc, mask=part_mask)
            tl.store(stats + part_row * 2, top, mask=valid)
            tl.store(stats + part_row * 2 + 1, total, mask=valid)
            # Every thread's stores come before the count, and the count before the reads of whoever is last.
            tl.debug_barrier()
            count = arrived + (q_start * GROUP + tile * BLOCK_M) * KV_HEADS + head
            before = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
            if before == active - 1:
                tl.store(count, 0)  # as the next launch needs it
                # Some columns at a time: whole rows of two parts would not fit the registers.
                for column in tl.static_range(0, V_PADDED, V_STEP):
                    some = column + tl.arange(0, V_STEP)
                    some_mask = valid[:, None] & (some < V_SIZE)[None, :]
                    sums = tl.zeros([BLOCK_M, V_STEP], tl.float32)
                    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK_M], tl.float32)
                    part_row = out_row
                    for _ in range(active):
                        part_at = parts + part_row[:, None] * V_SIZE + some[None, :]
                        part = tl.load(part_at, mask=some_mask, other=0.0, cache_modifier=".cg")
                        peak = tl.load(stats + part_row * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
                        part_total = tl.load(stats + part_row * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
                        highest = tl.maximum(top, peak)
                        shift = tl.where(highest == float("-inf"), 0.0, highest)
                        fade, share = tl.exp2(top - shift), tl.exp2(peak - shift)
                        sums = sums * fade[:, None] + part * share[:, None]
                        total = total * fade + part_total * share
                        top = highest
                        part_row += part_rows
                    _finish(out, sinks, sums, top, total, out_row, query_head, valid, some, V_SIZE)


@triton.jit
def _record(work, number, FIELDS: tl.constexpr):
    at = work + (number + 1) * FIELDS
    return (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3),
            tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7))  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "slots", "part_rows"])
def attention_kernel(
    q, k, v, sinks, slopes, out, parts, stats, arrived, work, cu_q, page_table,
    table_row, tokens, slots, part_rows, scale, softcap,
    q_token, q_head, k_page, k_row, k_head, v_page, v_row, v_head,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    V_SIZE: tl.constexpr, V_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    ONE_LOOP: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Attention of one site.  ``PAGE_SIZE`` 0: keys are packed rows; ``SPLIT``: keys may be cut in chunks."""
    ROW: tl.constexpr = KV_HEADS * GROUP * V_SIZE
    item = tl.program_id(0)
    # The records have room for every program, so the read need not wait for their number.
    request, tile, q_start, q_len, k_len, here, chunk, k_start = _record(work, item // KV_HEADS, FIELDS)
    total = tl.load(work) * KV_HEADS
    real = tl.load(cu_q + slots).to(tl.int64)
    _zero_rows(out, real * ROW, tokens.to(tl.int64) * ROW, 1024)
    if SPLIT:
        while item < total:
            _work(
                item % KV_HEADS, request, tile, q_start, q_len, k_len, here, chunk, k_start,
                q, k, v, sinks, slopes, out, parts, stats, arrived, page_table, table_row, part_rows, scale,
                softcap, q_token, q_head, k_page, k_row, k_head, v_page, v_row, v_head,
                LEFT, RIGHT, SOFTCAP, PAGE_SIZE, KV_HEADS, GROUP, SIZE, PADDED, V_SIZE, V_PADDED,
                BLOCK_M, BLOCK_N, True, ONE_LOOP, PRECISION,
            )  # fmt: skip
            item += tl.num_programs(0)
            if item < total:
                request, tile, q_start, q_len, k_len, here, chunk, k_start = _record(work, item // KV_HEADS, FIELDS)
    elif item < total:
        _work(
            item % KV_HEADS, request, tile, q_start, q_len, k_len, here, chunk, k_start,
            q, k, v, sinks, slopes, out, parts, stats, arrived, page_table, table_row, part_rows, scale,
            softcap, q_token, q_head, k_page, k_row, k_head, v_page, v_row, v_head,
            LEFT, RIGHT, SOFTCAP, PAGE_SIZE, KV_HEADS, GROUP, SIZE, PADDED, V_SIZE, V_PADDED,
            BLOCK_M, BLOCK_N, False, ONE_LOOP, PRECISION,
        )  # fmt: skip
