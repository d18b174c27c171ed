"""FlashInfer's prefill plans under SGLang, with doubles of both: what is planned, and what is left to SGLang."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fullgraph_compile.integrations.sglang import host_plan
from fullgraph_compile.pinned import PinnedRing

SLOTS = 4


class Wrapper:
    """As FlashInfer's: a plan fixes its rows at the first time, and each later one may have fewer."""

    def __init__(self, workspace: Tensor, layout: str, **buffers: Any) -> None:
        assert layout == "NHD" and buffers.pop("use_cuda_graph") and buffers.pop("backend") == "fa2"
        self.device = workspace.device
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer, self._pin_memory_int_workspace_buffer, self._kv_lens_buffer = (
            torch.zeros(64, dtype=torch.uint8) for _ in range(3)
        )
        for name, buffer in buffers.items():
            setattr(self, f"_{name}", buffer)
        self._max_total_num_rows: int | None = None
        self.device_reads = 0
        self.module_calls: list[tuple[Any, ...]] = []
        self._cached_module = SimpleNamespace(plan=self._module_plan)

    def _module_plan(self, *args: Any) -> list[int]:
        self.module_calls.append(args)
        return [args[6], args[7]]

    def plan(self, qo: Tensor, kv: Tensor, indices: Tensor, last: Tensor, *args: Any, **kwargs: Any) -> None:
        self.device_reads += 3
        self._max_total_num_rows = self._max_total_num_rows or int(qo[-1])
        self._plan_info = [self._max_total_num_rows, len(last)]


class FlashInferAttnBackend:
    prefill_backend, num_wrappers, dispatch_reason = "fa2", 1, None

    def __init__(self) -> None:
        self.full_cg_prefill_wrappers: list[Wrapper] | None = None
        self.made = 0

    def _create_full_cg_prefill_wrappers(self, slots: int, tokens: int) -> list[Wrapper]:
        self.made += 1
        buffers = {
            "qo_indptr_buf": torch.zeros(slots + 1, dtype=torch.int32),
            "paged_kv_indptr_buf": torch.zeros(slots + 1, dtype=torch.int32),
            "paged_kv_indices_buf": torch.zeros(512, dtype=torch.int32),
            "paged_kv_last_page_len_buf": torch.ones(slots, dtype=torch.int32),
        }
        return [Wrapper(torch.zeros(16, dtype=torch.uint8), "NHD", use_cuda_graph=True, backend="fa2", **buffers)]

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> str:
        if not batch.forward_mode.is_extend():
            return "decode"
        assert self.full_cg_prefill_wrappers is not None
        lengths = batch.seq_lens
        zero = torch.zeros(1, dtype=torch.int32)
        kv = torch.cat((zero, lengths.cumsum(0).int()))
        qo = torch.cat((zero, batch.extend_seq_lens.cumsum(0).int()))
        indices = torch.arange(int(kv[-1]), dtype=torch.int32) + 100
        [wrapper] = self.full_cg_prefill_wrappers
        more = {"custom_mask": batch.custom_mask, "non_blocking": True, "fixed_split_size": None}
        wrapper.begin_forward(qo, kv, indices, torch.ones(SLOTS, dtype=torch.int32), 8, 2, 64, 1, **more)
        return "prefill"


def batch(new: list[int], cached: list[int] | None = None, **more: Any) -> SimpleNamespace:
    unused = [0] * (SLOTS - len(new))
    new_all = torch.tensor([*new, *unused])
    lengths = torch.tensor([n + c for n, c in zip(new, cached or [0] * len(new), strict=True)] + unused)
    mode = {"is_extend": True, "is_target_verify": False, **more.pop("mode", {})}
    return SimpleNamespace(
        forward_mode=SimpleNamespace(**{n: lambda value=value: value for n, value in mode.items()}),
        batch_size=SLOTS, extend_seq_lens_cpu=list(new), extend_seq_lens=new_all, seq_lens=lengths,
        seq_lens_cpu=lengths.clone(), positions=torch.zeros(sum(new)), spec_info=None, **{"custom_mask": None, **more},
    )  # fmt: skip


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashInferAttnBackend]:
    class Event:
        def synchronize(self) -> None: ...
        def record(self) -> None: ...

    monkeypatch.setattr(PinnedRing, "_new_event", lambda self: Event())
    monkeypatch.setattr(PinnedRing, "_record", lambda self, event: event.record())
    monkeypatch.setattr(host_plan, "planner_arguments", lambda split: (-1, not split, 0))
    attention = FlashInferAttnBackend()
    assert host_plan.install(attention, SimpleNamespace()) is None
    for bucket in (64, 16, 8):
        attention.init_forward_metadata_out_graph(batch([bucket]), in_capture=True)
    yield attention


def wrapper_of(attention: FlashInferAttnBackend, bucket: int) -> Wrapper:
    return attention.init_forward_metadata_out_graph.__self__._wrappers[bucket][0]  # type: ignore[attr-defined]


def test_each_bucket_has_a_wrapper_of_its_rows_in_the_memory_of_the_first(attention: FlashInferAttnBackend) -> None:
    wrappers = [wrapper_of(attention, b) for b in (64, 16, 8)]
    assert [w._max_total_num_rows for w in wrappers] == [64, 16, 8] and attention.made == 1
    for name in ("_float_workspace_buffer", "_int_workspace_buffer", "_qo_indptr_buf", "_paged_kv_indices_buf"):
        assert len({getattr(w, name).data_ptr() for w in wrappers}) == 1


def test_a_replay_plans_its_bucket_from_host_lengths_without_reading_the_device(
    attention: FlashInferAttnBackend,
) -> None:
    wrapper = wrapper_of(attention, 16)
    before = wrapper.device_reads
    assert attention.init_forward_metadata_out_graph(batch([5, 7], [3, 0])) == "prefill"
    assert wrapper.device_reads == before
    [call] = wrapper.module_calls
    assert call[3].tolist() == [0, 5, 12, 12, 12] and call[4].tolist() == [0, 8, 15, 15, 15]
    assert call[5].tolist() == [8, 7, 0, 0]
    assert call[6:] == (16, SLOTS, 8, 2, 1, True, 64, 64, False, -1, -1, False, 0)
    assert wrapper._qo_indptr_buf.tolist() == [0, 5, 12, 12, 12]
    assert wrapper._paged_kv_indices_buf[:15].tolist() == list(range(100, 115))
    assert not wrapper_of(attention, 8).module_calls and not wrapper_of(attention, 64).module_calls


def test_plans_never_write_a_pinned_block_that_may_still_be_copied_from(attention: FlashInferAttnBackend) -> None:
    for _ in range(3):
        attention.init_forward_metadata_out_graph(batch([5]))
    pinned = [call[2].data_ptr() for call in wrapper_of(attention, 8).module_calls]
    assert len(set(pinned)) == 3


def test_a_plan_that_differs_from_the_captured_one_is_an_error(attention: FlashInferAttnBackend) -> None:
    wrapper_of(attention, 8)._cached_module = SimpleNamespace(plan=lambda *args: [0])
    with pytest.raises(RuntimeError, match=r"planned bucket 8 as \[0\], but its graph was captured with \[8, 4\]"):
        attention.init_forward_metadata_out_graph(batch([5]))


def test_a_bucket_may_be_left_to_sglangs_plan(attention: FlashInferAttnBackend) -> None:
    plans = host_plan.plans_of(attention)
    assert plans is not None and host_plan.plans_of(FlashInferAttnBackend()) is None
    plans.left.add(8)
    wrapper, other = wrapper_of(attention, 8), wrapper_of(attention, 16)
    before = wrapper.device_reads
    attention.init_forward_metadata_out_graph(batch([5]))
    assert wrapper.device_reads == before + 3 and not wrapper.module_calls
    attention.init_forward_metadata_out_graph(batch([9]))
    assert len(other.module_calls) == 1


def test_what_is_not_plain_prefill_is_left_to_sglang(attention: FlashInferAttnBackend) -> None:
    assert attention.init_forward_metadata_out_graph(batch([1], mode={"is_extend": False})) == "decode"
    wrapper = wrapper_of(attention, 8)
    attention.full_cg_prefill_wrappers = [wrapper]
    for more in ({"mode": {"is_target_verify": True}}, {"custom_mask": torch.ones(1)}):
        before = wrapper.device_reads
        attention.init_forward_metadata_out_graph(batch([5], **more))
        assert wrapper.device_reads == before + 3 and not wrapper.module_calls


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prefill_backend": "fa3"}, "'fa3', not 'fa2'"),
        ({"num_wrappers": 2, "dispatch_reason": "SLIDING_WINDOW"}, "more than one kind"),
    ],
)
def test_other_kernels_and_windows_keep_sglangs_plan(change: dict[str, Any], why: str) -> None:
    attention = FlashInferAttnBackend()
    for name, value in change.items():
        setattr(attention, name, value)
    assert why in str(host_plan.unsupported(attention, SimpleNamespace()))
    assert why in str(host_plan.install(attention, SimpleNamespace()))
    assert "init_forward_metadata_out_graph" not in vars(attention)


def test_ranks_that_agree_on_a_bucket_keep_sglangs_plan() -> None:
    runner = SimpleNamespace(require_mlp_tp_gather=True)
    assert "ranks agree" in str(host_plan.unsupported(FlashInferAttnBackend(), runner))
    assert "attention is object" in str(host_plan.unsupported(object(), SimpleNamespace()))


# -- where the graph computes what attention reads besides the plan ----------------------------------------------------

ROWS = torch.arange(5 * 64, dtype=torch.int32).view(5, 64)


class Gather:
    """SGLang's kernel: the cache's rows of each request, one after the other."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(rows: Tensor, requests: Tensor, lengths: Tensor, offsets: Tensor, start: None, out: Tensor, width: int):  # type: ignore[no-untyped-def]
            assert start is None and width == rows.shape[1] and len(requests) == len(lengths) == grid[0]
            for i, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
                out[int(offsets[i]) : int(offsets[i]) + length] = rows[request, :length]

        return run


@pytest.fixture
def in_graph(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The attention backend, and a runner whose "graph" of a bucket is what it ran at the capture."""
    monkeypatch.setattr(PinnedRing, "_new_event", lambda self: SimpleNamespace(synchronize=int, record=int))
    monkeypatch.setattr(PinnedRing, "_record", lambda self, event: event.record())
    monkeypatch.setattr(host_plan, "planner_arguments", lambda split: (-1, not split, 0))
    monkeypatch.setattr(sys.modules[__name__], "create_flashinfer_kv_indices_triton", Gather(), raising=False)
    attention: Any = FlashInferAttnBackend()
    attention.indices_updater_prefill = SimpleNamespace(req_to_token=ROWS, update=lambda prefix_lens: None)
    static = SimpleNamespace(**vars(batch([64])), req_pool_indices=torch.zeros(SLOTS, dtype=torch.int64))
    bodies: list[int] = []
    runner: Any = SimpleNamespace(_run_forward=lambda batch, tokens: bodies.append(tokens))
    assert host_plan.install(attention, runner, in_graph=True) is None
    for bucket in (64, 16, 8):
        static.positions = torch.zeros(bucket)
        static.seq_lens[0] = static.extend_seq_lens[0] = bucket
        attention.init_forward_metadata_out_graph(static, in_capture=True)
        runner._run_forward(static, bucket)
    assert bodies == [64, 16, 8]
    return SimpleNamespace(attention=attention, runner=runner, static=static)


def replay(there: SimpleNamespace, bucket: int, new: list[int], cached: list[int], requests: list[int]) -> Wrapper:
    live = batch(new, cached)
    for name in ("seq_lens", "extend_seq_lens"):
        getattr(there.static, name).copy_(getattr(live, name))
    there.static.req_pool_indices.copy_(torch.tensor([*requests, *[0] * (SLOTS - len(requests))]))
    there.attention.init_forward_metadata_out_graph(live)
    there.runner._run_forward(there.static, bucket)
    return wrapper_of(there.attention, bucket)


def test_a_replay_is_one_plan_and_the_graph_reads_the_static_buffers(in_graph: SimpleNamespace) -> None:
    wrapper = wrapper_of(in_graph.attention, 16)
    reads = wrapper.device_reads
    assert replay(in_graph, 16, [5, 7], [3, 0], [2, 4]) is wrapper
    [call] = wrapper.module_calls
    assert call[3].tolist() == [0, 5, 12, 12, 12] and call[5].tolist() == [8, 7, 0, 0]
    assert call[6:] == (16, SLOTS, 8, 2, 1, True, 64, 64, False, -1, -1, False, 0)
    assert wrapper.device_reads == reads
    assert wrapper._qo_indptr_buf.tolist() == [0, 5, 12, 12, 12]
    assert wrapper._paged_kv_indptr_buf.tolist() == [0, 8, 15, 15, 15]
    assert wrapper._paged_kv_indices_buf[:15].tolist() == [*range(128, 136), *range(256, 263)]


def test_a_replay_leaves_nothing_of_the_one_before(in_graph: SimpleNamespace) -> None:
    replay(in_graph, 16, [4, 4, 4, 4], [9, 9, 9, 9], [1, 2, 3, 4])
    wrapper = replay(in_graph, 8, [6], [0], [3])
    assert wrapper._qo_indptr_buf.tolist() == [0, 6, 6, 6, 6] == wrapper._paged_kv_indptr_buf.tolist()
    assert wrapper._paged_kv_indices_buf[:6].tolist() == [*range(192, 198)]


def test_a_plan_that_differs_from_the_captured_one_is_an_error_there_too(in_graph: SimpleNamespace) -> None:
    wrapper_of(in_graph.attention, 8)._cached_module = SimpleNamespace(plan=lambda *args: [0])
    with pytest.raises(RuntimeError, match=r"planned bucket 8 as \[0\]"):
        replay(in_graph, 8, [5], [0], [1])


def test_where_rows_are_listed_in_another_way_sglang_does_so(in_graph: SimpleNamespace) -> None:
    in_graph.attention.indices_updater_prefill.update = lambda prefix_lens, *, plan: None
    assert host_plan._gather_kernel(in_graph.attention, in_graph.runner) is None


def test_another_runner_gets_plans_of_its_own(in_graph: SimpleNamespace) -> None:
    first = in_graph.attention.init_forward_metadata_out_graph.__self__
    runner: Any = SimpleNamespace(_run_forward=lambda batch, tokens: None)
    assert host_plan.install(in_graph.attention, runner, in_graph=True) is None
    second = in_graph.attention.init_forward_metadata_out_graph.__self__
    assert second is not first
    in_graph.static.positions = torch.zeros(32)
    in_graph.attention.init_forward_metadata_out_graph(in_graph.static, in_capture=True)
    assert list(second._wrappers) == [32] and list(first._wrappers) == [64, 16, 8]
