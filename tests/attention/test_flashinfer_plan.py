"""FlashInfer: what is planned for each replay, and what its kernels are given, by a double of its functions."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fullgraph_compile.attention import flashinfer
from fullgraph_compile.attention.flashinfer import FlashInferAttention, FlashInferFA2, FlashInferFA3
from fullgraph_compile.attention.flashinfer_plan import (
    FloatWorkspaces,
    HostOffsets,
    PageTables,
    PlanKey,
    fa3_int_bytes,
)
from fullgraph_compile.pinned import PinnedRing
from tests.attention.cases import HALF, inputs_for, static_batch
from tests.attention.replaying import host_batch, in_pages

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Event:
    """Of a device that does nothing until it is waited for."""

    def __init__(self, device: deque[Any]) -> None:
        self.device, self.at = device, -1

    def record(self) -> None:
        self.device.append(self)

    def synchronize(self) -> None:
        while self in self.device:
            job = self.device.popleft()
            if job is not self and not isinstance(job, Event):
                job()


class Module:
    """FlashInfer's functions, as far as the host sees: a plan is a copy of what was written that runs later."""

    def __init__(self, device: deque[Any]) -> None:
        self.device = device
        self.plans: list[tuple[Any, ...]] = []
        self.runs: list[dict[str, Any]] = []
        self.copied: list[list[int]] = []
        self.info = [8, 1, 2]

    def workspace_size(self, device: Any, *arguments: Any) -> list[int]:
        return [1000 * arguments[3], 500]

    def plan(self, floats: Any, ints: Any, pinned: Any, *arguments: Any) -> list[int]:
        assert all(t.device.type == "cpu" and t.dtype == torch.int32 for t in arguments[:3])
        pinned.view(torch.int32)[: len(arguments[0])] = arguments[0]
        self.device.append(lambda: self.copied.append(pinned.view(torch.int32)[: len(arguments[0])].tolist()))
        self.plans.append((floats, ints, *arguments))
        return self.info

    def ragged_run(self, **arguments: Any) -> None:
        self.runs.append(arguments)

    paged_run = ragged_run


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    device: deque[Any] = deque()
    fake = Module(device)
    monkeypatch.setattr(flashinfer, "load_module", lambda key: fake)
    monkeypatch.setattr(flashinfer, "planner_arguments", lambda split: (-1, not split, 0))
    monkeypatch.setattr(PinnedRing, "_new_event", lambda self: Event(device))
    monkeypatch.setattr(PinnedRing, "_record", lambda self, event: event.record())
    yield fake


def test_b21_offsets_come_from_the_host_and_padded_rows_are_a_request_without_keys() -> None:
    static = static_batch([5, 0, 3], [21, 4, 3], tokens=12, slots=5, max_k=64)
    host = HostOffsets(host_batch([5, 0, 3], [21, 4, 3]), static)
    key = PlanKey.of(HALF, "fa2", static)
    assert host.q_indptr.tolist() == static.pad_cu_q.tolist() == [0, 5, 5, 8, 8, 8, 12]
    assert host.kv_indptr(key).tolist() == static.pad_cu_k.tolist() == [0, 21, 25, 28, 28, 28, 28]
    assert host.k_lens.tolist() == [21, 4, 3, 0, 0, 0]
    assert {t.dtype for t in (host.q_indptr, host.kv_indptr(key), host.k_lens)} == {torch.int32}


def test_pages_are_counted_for_fa2_and_rows_of_the_table_for_fa3() -> None:
    static = static_batch([5, 0, 3], [21, 4, 3], tokens=12, slots=4, max_k=64)
    static = in_pages(static, inputs_for(HALF, 12, 28), [21, 4, 3], 16)
    host = HostOffsets(host_batch([5, 0, 3], [21, 4, 3]), static)
    assert host.kv_indptr(PlanKey.of(HALF, "fa2", static)).tolist() == [0, 2, 3, 4, 4, 4]
    assert host.kv_indptr(PlanKey.of(HALF, "fa3", static)).tolist() == [0, 4, 8, 12, 16, 16]


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_the_page_table_is_read_where_it_was_staged(page_size: int) -> None:
    k_lens = [21, 0, 64]
    static = static_batch([5, 0, 3], k_lens, tokens=12, slots=4, max_k=64)
    static = in_pages(static, inputs_for(HALF, 12, 85), k_lens, page_size)
    tables = PageTables(static)
    tables.update()
    assert static.page_table is not None and tables.indices.data_ptr() == static.page_table.data_ptr()
    starts = tables.indptr.tolist()
    for request, n in enumerate([*k_lens, 0]):
        # How the kernels count the keys of a request, and where they look up its first page.
        pages = starts[request + 1] - starts[request]
        assert (pages - 1) * page_size + int(tables.on_last_page[request]) == n
        assert starts[request] == static.page_table[request].storage_offset()
    assert starts[-1] == starts[-2], "the request of padded rows has no pages"


def test_more_keys_than_an_offset_can_count_are_refused() -> None:
    static = static_batch([1], [1], tokens=2, slots=2)
    cache: Any = type("Cache", (), {"page_size": 2**20})
    with pytest.raises(ValueError, match="counts keys in int32, but 2 request slots of 1024 pages of 1048576"):
        PageTables(replace(static, cache=cache, page_table=torch.zeros(2, 1024, dtype=torch.int32)))


def test_b30_each_replay_is_planned_with_its_own_lengths_and_sizes_of_the_bucket(module: Module) -> None:
    backend = FlashInferFA2()
    static = static_batch([3], tokens=8, slots=4, max_k=8)
    sites = (HALF, replace(HALF, scale=0.5), replace(HALF, left=3))
    for lens in ([8], [2, 2], [1, 3, 1]):
        backend.plan(host_batch(lens), static, sites)
    assert len(module.plans) == 6, "two kinds of sites, three batches"
    assert [p[2].tolist() for p in module.plans[::2]] == [
        [0, 8, 8, 8, 8, 8], [0, 2, 4, 4, 4, 8], [0, 1, 4, 5, 5, 8],
    ]  # fmt: skip
    for plan in module.plans:
        tokens, requests, heads, kv_heads, page_size, graph, size, value_size, causal, _, *rest = plan[5:]
        assert (tokens, requests, heads, kv_heads, page_size, graph) == (8, 5, 8, 2, 1, True)
        assert (size, value_size, causal, rest) == (64, 64, True, [-1, False, 0])
    assert {p[14] for p in module.plans} == {-1, 3}


def test_plans_share_one_float_workspace_and_each_has_its_own_lists(module: Module) -> None:
    backend = FlashInferFA2()
    buckets = [static_batch([n], tokens=n, slots=4, max_k=64) for n in (64, 16)]
    sites = (HALF, replace(HALF, left=3))
    for static in buckets:
        backend.plan(host_batch([static.tokens]), static, sites)
    assert len({p[0].data_ptr() for p in module.plans}) == 1
    assert len({p[1].data_ptr() for p in module.plans}) == 4
    assert module.plans[0][0].numel() >= 64_000 and module.plans[0][1].numel() >= 500


def test_b68_a_larger_workspace_is_made_beside_the_one_that_graphs_know() -> None:
    floats = FloatWorkspaces(CPU)
    first = floats.of(100)
    address = first.data_ptr()
    second = floats.of(1000)
    assert first.data_ptr() == address and second is not first
    assert floats.of(50) is first and floats.of(101) is second


def test_no_workspace_is_made_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="its workspace would have to be made inside a capture; plan each"):
        FloatWorkspaces(CUDA).of(100)


def test_a_plan_of_other_sizes_than_the_captured_one_is_refused(module: Module) -> None:
    backend = FlashInferFA2()
    static = static_batch([3], tokens=8, slots=4, max_k=8)
    backend.plan(host_batch([3]), static, (HALF,))
    module.info = [16, 1, 2]
    with pytest.raises(RuntimeError, match=r"planned bucket 8 as \[16, 1, 2\], .* captured with \[8, 1, 2\]"):
        backend.plan(host_batch([4]), static, (HALF,))


def test_pinned_blocks_are_not_written_before_they_were_copied(module: Module) -> None:
    backend = FlashInferFA2()
    static = static_batch([3], tokens=64, slots=2, max_k=64)
    for n in range(1, 41):  # the device has done none of it
        backend.plan(host_batch([n]), static, (HALF,))
    while module.device:
        job = module.device.popleft()
        if not isinstance(job, Event):
            job()
    assert module.copied == [[0, n, n, 64] for n in range(1, 41)]


def test_metadata_of_one_call_is_planned_at_its_size_and_forgotten_with_it(module: Module) -> None:
    backend = FlashInferFA2()
    static = static_batch([5, 2])
    static = replace(static, max_q=5)
    backend.plan(host_batch([5, 2]), static, (HALF,))
    assert module.plans[0][10] is False and len(backend._calls) == 1
    del static
    gc.collect()
    assert len(backend._calls) == 0


def test_a_bucket_that_its_first_batch_fills_is_planned_for_graphs_from_the_second_on(module: Module) -> None:
    backend = FlashInferFA2()
    static = static_batch([8], max_k=8)
    for _ in range(3):
        backend.plan(host_batch([8]), static, (HALF,))
    assert [p[10] for p in module.plans] == [False, True, True]


@pytest.mark.parametrize(("backend", "cleaned"), [(FlashInferFA2, False), (FlashInferFA3, True)])
def test_the_kernel_gets_what_the_site_says_and_fa3_gets_v_without_padded_rows(
    backend: type[FlashInferAttention], cleaned: bool, module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = backend()
    static = static_batch([3, 1], tokens=8, slots=4, max_k=8)
    site = replace(HALF, left=5, softcap=20.0, scale=0.7)
    inputs = inputs_for(site, 8, 8)
    inputs.v[4:] = float("nan")
    kernels.plan(host_batch([3, 1]), static, (site,))
    out = kernels.run(*inputs.tensors(), site, static)
    assert out.shape == (8, 8, 64) and out.is_contiguous() and out.dtype is torch.bfloat16
    (got,) = module.runs
    assert got["o"] is out and got["q"] is inputs.q and got["k"] is inputs.k
    assert got["qo_indptr"] is static.pad_cu_q and got["kv_indptr"] is static.pad_cu_k
    assert (got["sm_scale"], got["logits_soft_cap"], got["window_left"], got["mask_mode"]) == (0.7, 20.0, 5, 1)
    assert (got["v"] is inputs.v) is not cleaned
    if cleaned:
        assert torch.equal(got["v"][:4], inputs.v[:4]) and (got["v"][4:] == 0).all()


def test_the_kernel_reads_the_pages_of_its_site(module: Module) -> None:
    backend = FlashInferFA2()
    static = static_batch([3, 1], [20, 1], tokens=8, slots=4, max_k=32)
    inputs = inputs_for(HALF, 8, 21)
    static = in_pages(static, inputs, [20, 1], 16)
    backend.plan(host_batch([3, 1], [20, 1]), static, (HALF,))
    backend.run(*inputs.tensors(), HALF, static)
    (got,) = module.runs
    assert static.cache is not None and got["paged_k_cache"] is static.cache.k[1]
    assert got["paged_kv_last_page_len"].tolist()[:4] == [4, -15, -16, -16]
    assert module.plans[0][9] == 16 and module.plans[0][3].tolist() == [0, 2, 3, 3, 3, 3]


def test_running_before_planning_is_an_error(module: Module) -> None:
    inputs = inputs_for(HALF, 8, 8)
    with pytest.raises(RuntimeError, match=r"flashinfer attention of layers\.0\.self_attn runs before it was planned"):
        FlashInferFA2().run(*inputs.tensors(), HALF, static_batch([8]))


def test_fa3s_lists_hold_the_most_tiles_that_a_bucket_can_have() -> None:
    key = PlanKey.of(HALF, "fa3", static_batch([1]))
    tiles = -(-2048 // 192) + 17 - 1
    assert fa3_int_bytes(2048, 17, key, 132) >= 7 * 4 * tiles * 8 + 4 * 133
    wider = replace(key, head_size=128, value_head_size=128)
    assert fa3_int_bytes(2048, 17, wider, 132) >= 7 * 4 * (16 + 16) * 8
