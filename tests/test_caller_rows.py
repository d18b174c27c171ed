"""A graph fetches its inputs from where the caller has them, and brings its results to where the caller gets them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import capture
from fullgraph_compile.caller_rows import CallerRows, recordable
from fullgraph_compile.graphs import create_recorder
from tests.models import tiny, tokens
from tests.runtime.bodies import OPTIONS, Scaled, run, runners

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = 300
# Shape and token dim of an input, its dtype: ids, embeddings, positions of three axes, flags, odd sizes.
INPUTS: list[tuple[tuple[int, ...], int, torch.dtype]] = [
    ((1, ROWS), 1, torch.int64),
    ((1, ROWS, 24), 1, torch.bfloat16),
    ((3, 1, ROWS), 2, torch.int64),
    ((ROWS, 5), 0, torch.float32),
    ((2, ROWS, 3), 1, torch.bool),
    ((2, 3, ROWS, 7), 2, torch.float16),
    ((1, ROWS), 1, torch.complex128),
]


class Rig:
    """Static tensors, and where the caller's lie."""

    def __init__(self, device: str, *, fetch: bool = True) -> None:
        self.device = torch.device(device)
        self.inputs = [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype in INPUTS]
        self.dims = [dim for _, dim, _ in INPUTS]
        self.addresses = torch.zeros(len(INPUTS), dtype=torch.int64, device=device)
        self.real = torch.zeros(1, dtype=torch.int32, device=device)
        self.rows = CallerRows(self.inputs, self.dims, self.addresses, self.real, fetch=fetch)

    def poison(self) -> None:
        for tensor in self.inputs:
            tensor.view(torch.uint8).fill_(255) if tensor.dtype is not torch.bool else tensor.fill_(True)

    def stage(self, count: int, *, given: bool = True) -> list[Tensor]:
        """The call's own inputs, which must be kept until they are taken."""
        own = [some(tensor, dim, count) for tensor, dim in zip(self.inputs, self.dims, strict=True)]
        self.addresses.copy_(torch.tensor([t.data_ptr() if given else 0 for t in own]))
        self.real.fill_(count)
        return own

    def check(self, own: list[Tensor], count: int) -> None:
        for tensor, dim, mine in zip(self.inputs, self.dims, own, strict=True):
            assert torch.equal(tensor.narrow(dim, 0, count), mine)
            assert not tensor.narrow(dim, count, ROWS - count).any()

    def fill(self) -> None:
        for tensor, dim in zip(self.inputs, self.dims, strict=True):
            tensor.copy_(some(tensor, dim, ROWS))

    def ask(self, count: int) -> list[Tensor]:
        """Memory of the caller's own, with some behind it that is nobody's; poisoned."""
        self.real.fill_(count)
        own = []
        for tensor in self.inputs:
            own.append(torch.full([tensor.numel() + 1], 7, device=self.device).to(tensor.dtype))
            assert own[-1].data_ptr() % 8 == 0
        self.addresses.copy_(torch.tensor([t.data_ptr() for t in own]))
        return own

    def check_brought(self, own: list[Tensor], count: int) -> None:
        for tensor, dim, mine in zip(self.inputs, self.dims, own, strict=True):
            rows = tensor.narrow(dim, 0, count)
            assert torch.equal(mine[: rows.numel()].view(rows.shape), rows)
            assert (mine[rows.numel() :] == torch.tensor(7).to(mine)).all(), "nothing else is written"


def some(like: Tensor, dim: int, count: int) -> Tensor:
    shape = [count if d == dim else size for d, size in enumerate(like.shape)]
    values = torch.randint(1, 100, shape, device=like.device)
    # One element further on: no more is known of where a tensor begins than that its elements lie at their own size.
    whole = torch.empty(values.numel() + 1, dtype=like.dtype, device=like.device)
    whole[1:] = values.flatten().to(like.dtype)
    return whole[1:].view(shape)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_copied_and_those_after_them_are_zeros(device: str) -> None:
    rig = Rig(device)
    for count in (ROWS, 1, 77, 0, ROWS - 1, 5):
        rig.poison()
        if count == 0:
            own = rig.stage(0, given=False)
            rig.rows.copy()
            assert not any(t.any() for t in rig.inputs), "an input that is not there is zeros"
            continue
        own = rig.stage(count)
        rig.rows.copy()
        rig.check(own, count)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_takes_them_from_where_they_are_at_each_replay(device: str) -> None:
    rig = Rig(device)
    recorder: Any = create_recorder("cuda" if device == "cuda" else "tape", rig.device)
    with recorder.session():
        rig.stage(ROWS, given=False)
        rig.rows.copy()
        graph = recorder.record(rig.rows.copy)
    a, b = 40, 299
    for count in (a, b, a):  # A-B-A
        rig.poison()
        own = rig.stage(count)
        graph.replay()
        rig.check(own, count)
    recorder.close()


@pytest.mark.parametrize("device", DEVICES)
def test_real_rows_are_brought_to_the_caller_and_nothing_else(device: str) -> None:
    rig = Rig(device, fetch=False)
    recorder: Any = create_recorder("cuda" if device == "cuda" else "tape", rig.device)
    with recorder.session():
        rig.rows.copy()  # to nobody
        graph = recorder.record(rig.rows.copy)
    for count in (40, 299, ROWS, 1, 40):
        rig.fill()
        own = rig.ask(count)
        graph.replay()
        rig.check_brought(own, count)
        rig.addresses.zero_()
        before = [t.clone() for t in own]
        rig.fill()
        graph.replay()
        assert all(map(torch.equal, own, before)), "nobody asked for them"
    recorder.close()


def layers(device: str, **options: Any) -> nn.Module:
    options = {**OPTIONS, "graphs": "cuda" if device == "cuda" else "tape", **options}
    return fgc.compile(tiny("Llama", num_hidden_layers=1).to(device), **options)


def test_inputs_that_are_no_piece_of_memory_are_copied_first() -> None:
    body = layers("cpu", strict=True)
    ids = tokens(14)[None]
    run(body, 7)  # traced
    every_other = torch.stack([tokens(7)] * 2, dim=-1)[None, :, 0]
    assert not every_other.is_contiguous()
    with torch.inference_mode():
        got = body(input_ids=every_other, use_cache=False).last_hidden_state
        want = body(input_ids=every_other.contiguous(), use_cache=False).last_hidden_state
        further = body(input_ids=ids[:, 7:], use_cache=False).last_hidden_state
        assert torch.equal(further, body(input_ids=ids[:, 7:].clone(), use_cache=False).last_hidden_state)
    assert torch.equal(got, want)


def test_an_input_that_torch_keeps_negated_is_read_as_it_is_meant() -> None:
    body = layers("cpu", strict=True)
    values = torch.complex(torch.randn(1, 7, 32), torch.randn(1, 7, 32))
    embeds = values.conj().imag
    assert embeds.is_neg()
    every = torch.view_as_complex(torch.view_as_real(values).contiguous()).conj().imag
    with torch.inference_mode():
        for _ in range(2):
            want = body(inputs_embeds=embeds.resolve_neg().contiguous(), use_cache=False).last_hidden_state
        one_piece = torch._neg_view(embeds.resolve_neg().contiguous().neg())
        assert one_piece.is_neg() and one_piece.is_contiguous()
        for given in (embeds, every, one_piece):
            assert torch.equal(body(inputs_embeds=given, use_cache=False).last_hidden_state, want)


@pytest.mark.parametrize("rows, dtype", [(5, torch.int64), (9, torch.int64), (7, torch.int32)])
def test_an_input_of_another_length_or_dtype_is_never_read(rows: int, dtype: torch.dtype) -> None:
    body = layers("cpu")
    run(body, 7)
    runner = runners(body)[0]
    graphs, batch = runner._sets[0], fgc.PrefillBatch([7], device="cpu")
    args: list[Any] = [None] * 64
    for i, dim in graphs.inputs.tokens.items():
        shape = list(graphs._largest.inputs[i].shape)
        shape[dim] = rows
        args[i] = torch.zeros(shape, dtype=dtype)
    before = graphs.buffers._block.clone()
    says = rf"is \[1, {rows}\] of {dtype} for PrefillBatch\(1 requests, .*; it must be \[1, 7\] of torch.int64$"
    with pytest.raises(ValueError, match=says):
        graphs.stage(8, args, batch, None)
    assert torch.equal(graphs.buffers._block, before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_launch_without_a_call_reads_inputs_of_its_own(device: str) -> None:
    body = layers(device)
    ids = tokens(14)[None].to(device)
    with torch.inference_mode():
        for _ in range(2):  # the first call is followed by some of our own
            want = body(input_ids=ids[:, :7].clone(), use_cache=False).last_hidden_state
        runner = runners(body)[0]
        launch = runner.relaunch(8)
        bucket = runner.buckets[8]
        for tensor in bucket.inputs.values():
            tensor.zero_()
        bucket.outputs[0].zero_()
        launch(), launch()
        assert torch.equal(bucket.outputs[0].narrow(1, 0, 7), want)
        assert torch.equal(body(input_ids=ids[:, :7].clone(), use_cache=False).last_hidden_state, want)


@pytest.mark.gpu
def test_a_pinned_number_may_be_written_to_after_the_call() -> None:
    """The device reads pinned memory when it comes to it."""
    options = {**OPTIONS, "graphs": "cuda", "attention": "triton"}
    body = fgc.compile(Scaled(layers=1).eval().cuda(), **options)
    call = {"input_ids": tokens(7)[None].cuda(), "position_ids": torch.arange(7, device="cuda")[None]}
    scale = torch.tensor(2.0).pin_memory()
    with torch.inference_mode():
        for _ in range(2):
            want = body(**call, scale=scale)
        torch.cuda._sleep(10**8)
        got = body(**call, scale=scale)
        scale.fill_(3.0)
        assert torch.equal(got, want)


def test_where_the_kernel_is_not_to_be_had_they_are_copied_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "recordable", lambda device: False)
    body, plain = layers("cpu", strict=True), tiny("Llama", num_hidden_layers=1)
    monkeypatch.setattr(CallerRows, "copy", lambda self: pytest.fail("recorded"))
    for count in (12, 7, 3, 12):
        ids = tokens(count)[None]
        with torch.inference_mode():
            got = body(input_ids=ids, use_cache=False).last_hidden_state
            want = plain(input_ids=ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(got, want)
        for i, dim in runners(body)[0].inputs.tokens.items():
            bucket = runners(body)[0].buckets[8 if count <= 8 else 16]
            assert not bucket.inputs[i].narrow(dim, count, bucket.tokens - count).any()


def test_kernels_are_there_where_triton_is() -> None:
    assert recordable(torch.device("cpu"))
    assert recordable(torch.device("cuda")) == (importlib.util.find_spec("triton") is not None)


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_the_callers_own_and_made_by_the_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = layers(device, strict=True)
    a, b = tokens(7, 1)[None].to(device), tokens(5, 2)[None].to(device)
    with torch.inference_mode():
        body(input_ids=a, use_cache=False)
        monkeypatch.setattr(Tensor, "clone", lambda self, **_: pytest.fail("copied by the host"))
        first = body(input_ids=a, use_cache=False).last_hidden_state
        static = runners(body)[0].buckets[8].outputs[0]
        kept = first.cpu().numpy().copy()
        second = body(input_ids=b, use_cache=False).last_hidden_state
        again = body(input_ids=a, use_cache=False).last_hidden_state
    assert len({t.data_ptr() for t in (first, second, again, static)}) == 4
    assert torch.equal(first.cpu(), torch.from_numpy(kept)) and torch.equal(first, again)
    assert not torch.equal(first[:, :5], second)


def test_without_copies_results_are_views_of_the_graphs_memory() -> None:
    body = layers("cpu", strict=True, clone_outputs=False)
    with torch.inference_mode():
        for _ in range(2):
            got = body(input_ids=tokens(7)[None], use_cache=False).last_hidden_state
    assert got.data_ptr() == runners(body)[0].buckets[8].outputs[0].data_ptr()


@pytest.mark.parametrize("shape, dim", [((1, 300), 1), ((2, 300, 3), 1), ((2, 3, 300, 7), 2), ((300,), 0)])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_memory_like_the_rows_of_a_bucket_is_contiguous(shape: tuple[int, ...], dim: int, count: int) -> None:
    assert torch.empty_like(torch.empty(shape).narrow(dim, 0, count)).is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("also", [[], [torch.int64]])
def test_an_input_without_elements_is_passed_by(device: str, also: list[torch.dtype]) -> None:
    static = [torch.ones(1, ROWS, 0, device=device), *(torch.ones(1, ROWS, dtype=d, device=device) for d in also)]
    own = [some(t, 1, 7) for t in static]
    addresses = torch.tensor([t.data_ptr() for t in own], device=device)
    real = torch.tensor([7], dtype=torch.int32, device=device)
    CallerRows(static, [1] * len(static), addresses, real, fetch=True).copy()
    for tensor, mine in zip(static, own, strict=True):
        assert torch.equal(tensor[:, :7], mine) and not tensor[:, 7:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_body_of_one_fixed_shape_has_none_of_them(device: str) -> None:
    static = torch.zeros(4, dtype=torch.int64, device=device)
    recorder: Any = create_recorder("cuda" if device == "cuda" else "tape", torch.device(device))
    rows = CallerRows([], [], static[:0], torch.zeros(1, dtype=torch.int32, device=device), fetch=True)

    def body() -> None:
        rows.copy()
        static.add_(1)

    with recorder.session():
        graph = recorder.record(body)
    graph.replay()
    assert static.tolist() == [1] * 4
    recorder.close()
