"""What a batch says, and what of it reaches the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fullgraph_compile import PagedKVCache, PrefillBatch
from fullgraph_compile.batch import StaticBatch, active_batch
from fullgraph_compile.host_values import counted, ranges
from fullgraph_compile.staging import ExactBuffers, Poison, StaticBuffers

CPU = torch.device("cpu")


def test_positions_and_last_rows() -> None:
    batch = PrefillBatch([3, 0, 2], device="cpu")
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.last_token_rows.tolist() == [2, 4]
    assert (batch.tokens, batch.requests, batch.longest) == (5, 3, 3)


def test_positions_of_one_request_begin_after_its_prefix_and_are_the_batchs_own() -> None:
    cache = PagedKVCache([(1, 8, 8)], pages=8, page_size=4, dtype=torch.float32, device="cpu")
    batch = PrefillBatch([3], [5], cache=cache, pages=[[1, 2]])
    assert batch.position_ids.tolist() == [5, 6, 7] and batch.host_positions.tolist() == [5, 6, 7]
    batch.position_ids.zero_()
    assert PrefillBatch([9], device="cpu").position_ids.tolist() == list(range(9))
    assert PrefillBatch([0], device="cpu").position_ids.tolist() == []


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        (([],), ValueError, "no request"),
        (([3, -1],), ValueError, "holds -1"),
        (([3, 1.5],), TypeError, "1.5"),
        ((7,), TypeError, "new_tokens=7"),
        (([3], [0, 0]), ValueError, "2 entries, new_tokens has 1"),
        (([3], [5]), ValueError, "no KV cache"),
    ],
)
def test_bad_lengths_are_refused_by_value(args: tuple, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        PrefillBatch(*args, device="cpu")
    assert PrefillBatch([3], device="cpu").tokens == 3


def test_batches_do_not_nest_and_the_outer_one_survives() -> None:
    outer, inner = PrefillBatch([3], device="cpu"), PrefillBatch([2], device="cpu")
    with outer:
        with pytest.raises(RuntimeError, match="entered inside"), inner:
            pass
        assert active_batch() is outer
    assert active_batch() is None
    with inner:
        assert active_batch() is inner


def staged(lengths: list[int], tokens: int = 16, slots: int = 6, poison: Poison | None = None) -> StaticBatch:
    buffers = StaticBuffers(CPU, [(tokens, slots)], max_k=tokens)
    # The largest batch first, so that a tail which is not rewritten shows.
    buffers.stage(PrefillBatch([3, 3, 3, 3, 2, 2], device="cpu"), tokens)
    return buffers.stage(PrefillBatch(lengths, device="cpu"), tokens, poison)


@pytest.mark.parametrize("poison", [None, Poison.IMPOSSIBLE, Poison.PLAUSIBLE])
def test_b14_every_vector_has_its_documented_tail(poison: Poison | None) -> None:
    static = staged([4, 1], poison=poison)
    assert static.num_real_tokens.tolist() == [5]
    assert static.cu_q.tolist() == [0, 4, 5, 5, 5, 5, 5]
    assert static.cu_k.tolist() == [0, 4, 5, 5, 5, 5, 5]
    assert static.q_lens.tolist() == [4, 1, 0, 0, 0, 0]
    assert static.k_lens.tolist() == [4, 1, 0, 0, 0, 0]
    assert static.pad_cu_q.tolist() == [0, 4, 5, 5, 5, 5, 5, 16]
    assert static.pad_cu_k.tolist() == [0, 4, 5, 5, 5, 5, 5, 5]
    assert static.cu_q.data_ptr() != static.cu_k.data_ptr()


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_b23_sentinels_count_as_nothing(lengths: list[int]) -> None:
    static = staged(lengths, tokens=24) if sum(lengths) > 16 else staged(lengths)
    assert int(static.q_lens.sum()) == sum(lengths) == int(static.num_real_tokens)
    assert (static.cu_q.diff() == static.q_lens).all()
    assert (static.cu_k.diff() == static.k_lens).all()


def test_a_batch_outside_of_the_bounds_of_capture_is_refused_before_anything_is_written() -> None:
    buffers = StaticBuffers(CPU, [(8, 2)], max_k=6)
    static = buffers.of(8)
    buffers.stage(PrefillBatch([2, 3], device="cpu"), 8)
    before = static.cu_q.clone()
    for lengths in ([7], [9], [1, 1, 1]):
        with pytest.raises(ValueError, match="does not fit bucket 8 with 2 request slots and 6 tokens a request"):
            buffers.stage(PrefillBatch(lengths, device="cpu"), 8)
    assert torch.equal(static.cu_q, before)


def test_addresses_never_change() -> None:
    buffers = StaticBuffers(CPU, [(8, 2)], max_k=8)
    static = buffers.of(8)
    pointers = [static.cu_q.data_ptr(), static.k_lens.data_ptr()]
    for lengths in ([8], [1, 1], [3]):
        assert buffers.stage(PrefillBatch(lengths, device="cpu"), 8) is static
    assert [static.cu_q.data_ptr(), static.k_lens.data_ptr()] == pointers


def test_the_bound_of_queries_is_never_one() -> None:
    assert StaticBuffers(CPU, [(1, 1)], max_k=1).of(1).max_q == 2
    assert ExactBuffers(CPU).stage(PrefillBatch([1, 1], device="cpu")).max_q == 2


@pytest.mark.parametrize("lengths", [[5], [3, 4]])
def test_what_is_written_to_the_positions_that_a_caller_has_is_the_callers_own(lengths: list[int]) -> None:
    batch = PrefillBatch(lengths, device="cpu")
    want = batch.host_positions.tolist()
    batch.position_ids.add_(2)
    assert batch.host_positions.tolist() == batch.row_of_positions[0].tolist() == want


@pytest.mark.parametrize("requests", [1, 3, 200])
def test_positions_made_on_the_device_are_those_of_the_host(requests: int) -> None:
    starts = [3 * (i % 2) for i in range(requests)]
    ends = [start + i % 4 for i, start in enumerate(starts)]
    made = ranges(starts, ends, torch.device("cpu"))
    # Dynamo takes a view for another kind of argument, so one request's and several requests' must both be none.
    assert made.dtype is torch.int64 and not made._is_view()
    want = [n for start, end in zip(starts, ends, strict=True) for n in range(start, end)]
    assert made.tolist() == counted(starts, ends).tolist() == want
    made.zero_()  # nobody else's
    assert ranges(starts, ends, torch.device("cpu")).tolist() == counted(starts, ends).tolist()


def test_positions_of_more_tokens_than_were_counted_before() -> None:
    for lengths in ([3, 4], [5000, 2], [20000]):
        assert PrefillBatch(lengths, device="cpu").row_of_positions[0].tolist() == [
            i for n in lengths for i in range(n)
        ]


def test_positions_under_a_fake_mode_are_fake() -> None:
    batch = PrefillBatch([2, 3], device="cpu")
    assert PrefillBatch([2, 3], device="cpu").position_ids.tolist() == [0, 1, 0, 1, 2]
    with FakeTensorMode():
        assert isinstance(batch.position_ids, FakeTensor)
    assert PrefillBatch([2, 3], device="cpu").position_ids.tolist() == [0, 1, 0, 1, 2]
