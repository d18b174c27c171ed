"""Writing K and V into the pages: which slots change, and that nothing else does.

``interpreted`` runs the GPU kernel in Triton's interpreter: TRITON_INTERPRET=1, with Triton installed.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullgraph_compile.attention import kv_write
from fullgraph_compile.attention.kv_write import write_kv
from fullgraph_compile.graphs.cuda import CudaGraphRecorder
from fullgraph_compile.graphs.tape import TapeRecorder
from tests.attention.kv_pools import NAN, Pools, check_write, ids, total

INF = float("inf")
INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
WAYS = [
    "index",
    pytest.param("interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def device_of(way: str) -> str:
    return "cuda" if way == "cuda" else "cpu"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "interpreted":
        monkeypatch.setattr(kv_write, "_index", kv_write._launch)
    if request.param == "cuda":
        assert kv_write._kernel() is not None, "Triton is not installed: the kernel would not be tried"
    return str(request.param)


# -- rows of the fault list --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, -1, -9, 63, 64, 2**40])
@pytest.mark.parametrize("poison", [NAN, INF, 1.0])
def test_b11_padding_changes_no_slot_of_a_request(way: str, pad: int, poison: float) -> None:
    pools = Pools.of(16, 4, device=device_of(way))
    k, v = pools.rows(8)
    k[5:], v[5:] = poison, poison
    check_write(pools, k, v, [4, 5, 62, 7, 30], tail=[pad] * 3)
    assert (pools.k[15, 3] == 7).all()


def test_b11_a_real_row_without_a_slot_is_written_nowhere(way: str) -> None:
    pools = Pools.of(16, 4, device=device_of(way))
    k, v = pools.rows(4)
    wanted = pools.expect(k[1:2], v[1:2], [9])
    write_kv(k, v, pools.k, pools.v, ids([-1, 9, 64, -64], str(k.device)), total(4, str(k.device)))
    pools.check(wanted)


@pytest.mark.parametrize("given_ids", ["real rows", "bucket"])
def test_b12_rows_are_counted_from_the_metadata(way: str, given_ids: str) -> None:
    for n in range(9):
        pools = Pools.of(5, 4, device=device_of(way))
        k, v = pools.rows(8, seed=n)
        slots = [19 - i for i in range(n)]
        check_write(pools, k, v, slots, tail=[] if given_ids == "real rows" else None)


def test_b15_padding_that_runs_twenty_times_leaves_the_lowest_page_alone(way: str) -> None:
    from fullgraph_compile.cache import PagedKVCache

    device = device_of(way)
    cache = PagedKVCache([(2, 8, 8)], pages=8, page_size=4, dtype=torch.float32, device=device)
    a, b = cache.allocate(4), cache.allocate(12)
    assert a == [1]
    cache.k[0][a[0]], cache.v[0][a[0]] = 7.0, 7.0
    slots = [page * 4 + offset for page in b for offset in range(4)]
    new = torch.randn(16, 2, 8, device=device)
    new[3:] = NAN
    for round_ in range(20):
        at = slots[round_ % 9 :][:3]
        write_kv(new, new, cache.k[0], cache.v[0], ids([*at, *[0] * 13], device), total(3, device))
        assert torch.equal(cache.k[0].flatten(0, 1)[at], new[:3])
    for t in (cache.k[0], cache.v[0]):
        assert (t[a[0]] == 7).all() and (t[0] == 0).all() and not t.isnan().any()


@pytest.mark.parametrize("rows, locations", [(8, 6), (6, 8), (8, 8), (6, 6)])
def test_b16_a_padded_and_an_unpadded_length_do_not_collide(way: str, rows: int, locations: int) -> None:
    slots = [4, 9, 5, 19, 8, 11]
    caches = [Pools.of(5, 4, device=device_of(way)), Pools.of(5, 4, 1, 16, device=device_of(way))]
    for pools in caches:
        k, v = pools.rows(rows)
        check_write(pools, k, v, slots, tail=[0] * (locations - 6))


# -- geometry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads, size, value_size",
    [(1, 1, 1), (2, 8, 8), (3, 24, 16), (1, 16, 80), (5, 192, 128), (8, 128, 128), (40, 64, 96), (2, 576, 512)],
)
def test_every_geometry_is_written_bit_for_bit(
    way: str, page_size: int, dtype: torch.dtype, heads: int, size: int, value_size: int
) -> None:
    pools = Pools.of(24 // page_size + 2, page_size, heads, size, value_size, dtype, device_of(way))
    k, v = pools.rows(7)
    slots = [page_size + i for i in (3, 17, 0, 8, 23)]
    check_write(pools, k, v, slots)


def strided(t: Tensor) -> dict[str, Tensor]:
    """The same values, as models lay them out."""
    rows, heads, size = t.shape
    fused = torch.full((rows, 3 * heads, size), NAN).to(t)
    fused[:, heads : 2 * heads] = t
    spread = torch.full((2 * rows, heads, size + 3), NAN).to(t)
    spread[::2, :, 1:-2] = t
    return {
        "head by head": t.transpose(0, 1).contiguous().transpose(0, 1),
        "out of a fused projection": fused[:, heads : 2 * heads],
        "rows and heads apart": spread[::2, :, 1:-2],
        "last dim not contiguous": t.transpose(0, 2).contiguous().transpose(0, 2),
        "one head, expanded": t[:, :1].expand(-1, heads, -1),
    }


@pytest.mark.parametrize("layout", strided(torch.zeros(1, 1, 1)))
@pytest.mark.parametrize("other", ["contiguous", "head by head"])
def test_strided_rows_are_read_where_they_lie(way: str, layout: str, other: str) -> None:
    pools = Pools.of(8, 4, 3, 16, 24, device=device_of(way))
    k, v = pools.rows(9)
    slots = [4, 31, 12, 5, 20, 6, 21]
    k = strided(k)[layout]
    check_write(pools, k, v if other == "contiguous" else strided(v)[other], slots)
    assert layout == "one head, expanded" or not k.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_slot_ids_of_either_width_and_any_stride(way: str, dtype: torch.dtype) -> None:
    device = device_of(way)
    pools = Pools.of(8, 4, device=device)
    k, v = pools.rows(4)
    check_write(pools, k, v, [9, 30, 4], ids_dtype=dtype)
    wanted = pools.expect(k, v, [11, 5])
    apart = ids([11, -5, 5, 31, 0, 31, 0, 31], device, dtype)[::2]
    write_kv(k, v, pools.k, pools.v, apart, total(2, device))
    pools.check(wanted)


def test_a_pool_that_holds_k_and_v_in_one_slot_is_written(way: str) -> None:
    """As some engines keep it: [pages, page_size, K or V, heads, size]."""
    device = device_of(way)
    both = torch.full((6, 4, 2, 2, 8), 7.0, device=device)
    new = torch.randn(3, 2, 8, device=device)
    write_kv(new, -new, both[:, :, 0], both[:, :, 1], ids([4, 23, 9], device), total(3, device))
    flat = both.flatten(0, 1)
    assert torch.equal(flat[[4, 23, 9], 0], new) and torch.equal(flat[[4, 23, 9], 1], -new)
    flat[[4, 23, 9]] = 7
    assert (flat == 7).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_real_rows_go_to_their_slots_and_nothing_else_changes(data: st.DataObject) -> None:
    page_size, pages = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 6))
    heads, size, value_size = (data.draw(st.integers(1, 4)) for _ in range(3))
    usable = st.integers(page_size, pages * page_size - 1)
    slots = data.draw(st.lists(usable, unique=True, max_size=12))
    tail = data.draw(st.lists(st.integers(-3, pages * page_size + 3), max_size=6))
    pools = Pools.of(pages, page_size, heads, size, value_size)
    k, v = pools.rows(len(slots) + len(tail))
    check_write(pools, k, v, slots, tail=tail)


# -- replayed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorder", ["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_recorded_write_follows_the_metadata_big_then_small_then_big(recorder: str) -> None:
    device = "cuda" if recorder == "cuda" else "cpu"
    pools = Pools.of(8, 4, 3, 16, 24, device=device)
    k, v = pools.rows(16)
    slot_ids, real = ids([0] * 16, device), total(0, device)

    def run() -> None:
        write_kv(k, v, pools.k, pools.v, slot_ids, real)

    made: Any = CudaGraphRecorder(torch.device("cuda")) if recorder == "cuda" else TapeRecorder()
    with made.session():
        run()
        graph = made.record(run)
    big, small, none = list(range(4, 20)), [31, 4, 9], []
    for step, slots in enumerate([big, small, none, [25], big, small]):
        pools.whole[0].fill_(7)
        pools.whole[1].fill_(7)
        for t, new in zip((k, v), pools.rows(16, seed=step), strict=True):
            t.copy_(new)
            t[len(slots) :] = NAN
        # The tail holds slots of live requests: only the count tells them apart.
        slot_ids.copy_(ids([*slots, *[30] * (16 - len(slots))]))
        real.fill_(len(slots))
        wanted = pools.expect(k, v, slots)
        graph.replay()
        pools.check(wanted)
    if recorder == "cuda":
        assert graph.nodes in (1, None)  # one launch writes both; None: the driver cannot be asked
    made.close()


@pytest.mark.gpu
def test_nothing_is_read_on_the_host() -> None:
    pools = Pools.of(8, 4, device="cuda")
    k, v = pools.rows(8)
    slot_ids, real = ids([4, 5, 6, 7, 8, 0, 0, 0], "cuda"), total(5, "cuda")
    write_kv(k, v, pools.k, pools.v, slot_ids, real)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        write_kv(k, v, pools.k, pools.v, slot_ids, real)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
def test_a_slot_past_2_to_the_31_elements_is_written() -> None:
    pages = torch.zeros(2**18 + 2, 16, 4, 128, dtype=torch.bfloat16, device="cuda")  # 4 GiB
    slots = [16, pages.shape[0] * 16 - 1]
    new = torch.randn(2, 4, 128, device="cuda").bfloat16()
    write_kv(new, new, pages, pages, ids(slots, "cuda"), total(2, "cuda"))
    assert torch.equal(pages.flatten(0, 1)[slots], new)


def test_triton_is_not_imported_for_a_cpu() -> None:
    kv_write._kernel.cache_clear()
    check_write(pools := Pools.of(5, 4), *pools.rows(3), [4, 19])
    assert kv_write._kernel.cache_info().currsize == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_index_ops_serve_where_triton_is_missing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_triton(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_triton)
    kv_write._kernel.cache_clear()
    try:
        assert kv_write._kernel() is None
        check_write(pools := Pools.of(5, 4, device=device), *pools.rows(3), [4, 19])
    finally:
        kv_write._kernel.cache_clear()
