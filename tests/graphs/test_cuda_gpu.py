"""CUDA graphs on a GPU: what the tape cannot show (streams, pools, broken captures)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fullgraph_compile.graphs import CaptureError, GraphRecorder, RecordedGraph, create_recorder, opaque

pytestmark = pytest.mark.gpu


class Layers:
    """A few matmuls over static buffers of ``rows`` rows."""

    def __init__(self, rows: int, device: str = "cuda:0") -> None:
        self.weight = torch.randn(256, 256, device=device) / 16
        self.x = torch.randn(rows, 256, device=device)
        self.out = torch.empty_like(self.x)

    def eager(self) -> Tensor:
        h = self.x
        for _ in range(3):
            h = torch.relu(h @ self.weight) + h
        return h

    def run(self) -> None:
        with torch.no_grad():
            self.out.copy_(self.eager())

    def right(self, graph: RecordedGraph, times: int = 1) -> bool:
        for _ in range(times):
            self.x.normal_()
            expected = self.eager()
            self.out.fill_(float("nan"))
            graph.replay()
            if not torch.allclose(self.out, expected, rtol=1e-3, atol=1e-3):
                return False
        return True


def record(recorder: GraphRecorder, *runs: Layers) -> list[RecordedGraph]:
    with recorder.session():
        for layers in runs:
            layers.run()
            layers.run()
        return [recorder.record(layers.run) for layers in runs]


@pytest.fixture
def recorder() -> Iterator[GraphRecorder]:
    made = create_recorder("cuda", torch.device("cuda"))
    assert made is not None
    yield made
    made.close()


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_replays_are_right_in_any_order_and_count_their_nodes(recorder: GraphRecorder) -> None:
    small, large = Layers(8), Layers(512)
    b, a = record(recorder, large, small)
    assert all(layers.right(graph) for layers, graph in ((small, a), (large, b), (small, a), (large, b)))
    assert a.nodes is not None
    assert a.nodes >= 10


def test_recording_runs_nothing(recorder: GraphRecorder) -> None:
    layers = Layers(8)
    layers.run()
    layers.out.fill_(7.0)
    with recorder.session():
        recorder.record(layers.run)
    assert layers.out.eq(7).all()


def test_replay_runs_on_the_callers_stream_in_its_order(recorder: GraphRecorder) -> None:
    layers = Layers(64)
    (graph,) = record(recorder, layers)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for value in (1.0, 2.0, 3.0):
            torch.cuda._sleep(10_000_000)  # the host is far ahead
            layers.x.fill_(value)
            graph.replay()
        got = layers.out.clone()
        expected = layers.eager()
    stream.synchronize()
    assert torch.allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_a_session_waits_for_the_callers_stream_and_is_waited_for(recorder: GraphRecorder) -> None:
    x, y = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    before = torch.cuda.current_stream()
    torch.cuda._sleep(50_000_000)
    x.fill_(3)
    with recorder.session():
        assert torch.cuda.current_stream() != before
        torch.cuda._sleep(50_000_000)
        y.copy_(x)
    assert torch.cuda.current_stream() == before
    assert y.item() == 3


def test_opaque_has_no_effect(recorder: GraphRecorder) -> None:
    layers = Layers(8)
    eager = layers.eager
    layers.eager = opaque(eager)  # type: ignore[method-assign]
    (graph,) = record(recorder, layers)
    assert layers.right(graph)


def test_another_threads_work_does_not_break_a_capture(recorder: GraphRecorder) -> None:
    layers, stop, errors = Layers(64), threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                # Not a wait for the whole device: CUDA forbids that while any stream captures.
                torch.ones(1000, device="cuda").sum().item()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        (graph,) = record(recorder, layers)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert layers.right(graph)


def test_a_capture_within_a_capture_is_refused(recorder: GraphRecorder) -> None:
    layers = Layers(8)
    (graph,) = record(recorder, layers)

    def nested() -> None:
        layers.run()
        recorder.record(layers.run)

    with pytest.raises(CaptureError, match="under way"), recorder.session():
        recorder.record(nested)
    assert not torch.cuda.is_current_stream_capturing()
    assert layers.right(graph)


@pytest.mark.parametrize("closed", ["first", "last"])
def test_b70_closing_one_graph_leaves_the_others_whole(recorder: GraphRecorder, closed: str) -> None:
    a, b = Layers(64), Layers(64)
    first, last = record(recorder, a, b)
    (first if closed == "first" else last).close()
    torch.cuda.empty_cache()
    churn = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)]
    layers, graph = (b, last) if closed == "first" else (a, first)
    assert layers.right(graph, times=10)
    assert len(churn) == 16


def test_b70_closing_another_recorder_leaves_the_graphs_whole(recorder: GraphRecorder) -> None:
    a, b = Layers(64), Layers(64)
    (graph,) = record(recorder, a)
    other = create_recorder("cuda", torch.device("cuda"))
    assert other is not None
    record(other, b)
    other.close()
    torch.cuda.empty_cache()
    churn = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)]
    assert a.right(graph, times=10)
    assert len(churn) == 16


def test_b73_capture_and_close_twenty_times_takes_no_more_memory() -> None:
    sizes, streams = [], set()
    for _ in range(20):
        recorder = create_recorder("cuda", torch.device("cuda"))
        assert recorder is not None
        layers = Layers(256)
        with recorder.session():
            streams.add(torch.cuda.current_stream().cuda_stream)
            layers.run()
            layers.run()
            graph = recorder.record(layers.run)
        assert layers.right(graph)
        recorder.close()
        del recorder, layers, graph
        sizes.append(reserved())
    assert len(streams) == 1
    assert len(set(sizes[3:])) == 1


def test_b73_closing_every_graph_frees_the_pool_and_a_recorder_that_is_dropped_does_too() -> None:
    def once(close: bool) -> None:
        recorder = create_recorder("cuda", torch.device("cuda"))
        assert recorder is not None
        layers = Layers(1 << 14)
        for graph in record(recorder, layers):
            assert layers.right(graph)
            if close:
                graph.close()

    once(True)
    before = reserved()
    for close in (True, False, True):
        once(close)
        assert reserved() == before


@pytest.mark.parametrize("how", ["python", "cuda"])
def test_b74_a_failed_capture_ends_cleanly(how: str) -> None:
    recorder = create_recorder("cuda", torch.device("cuda"))
    assert recorder is not None
    good, bad, later = Layers(64), Layers(1 << 14), Layers(32)

    def fails() -> None:
        bad.run()
        if how == "python":
            raise ValueError("in the middle")
        bad.out.sum().item()  # not allowed under capture

    (graph,) = record(recorder, good)
    with pytest.raises((ValueError, RuntimeError)), recorder.session():
        bad.run()
        recorder.record(fails)
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.isfinite(torch.randn(10, device="cuda")).all()  # the generator does not think that it is captured
    assert good.right(graph, times=3)
    (after,) = record(recorder, later)
    assert later.right(after)
    assert good.right(graph)
    recorder.close()
    bad = good = later = None  # type: ignore[assignment]
    del graph, after
    size = reserved()
    pools = {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()}
    assert pools <= {(0, 0)}, f"{size} bytes are reserved still"


def test_weak_references_die_after_close(recorder: GraphRecorder) -> None:
    layers = Layers(8)
    (graph,) = record(recorder, layers)
    alive = [weakref.ref(layers.x), weakref.ref(layers.weight)]
    graph.close()
    with pytest.raises(RuntimeError, match="closed"):
        graph.replay()
    del layers
    gc.collect()
    assert not any(r() is not None for r in alive)


def test_b110_the_device_given_is_the_device_captured_on() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    recorder = create_recorder("cuda", torch.device("cuda:1"))
    assert recorder is not None
    layers = Layers(64, "cuda:1")
    with torch.cuda.device(0):
        (graph,) = record(recorder, layers)
        assert torch.cuda.current_device() == 0
        assert layers.right(graph, times=3)
        assert torch.cuda.current_device() == 0
    recorder.close()
