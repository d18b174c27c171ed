"""CUDA graphs: one pool and one stream for all graphs of a recorder."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.graphs.base import CaptureError, GraphRecorder, RecordedGraph, casts_of_its_own, collector_off
from fullgraph_compile.graphs.streams import borrow_stream, ordered, return_stream


class CudaGraph(RecordedGraph):
    """One captured run; holds what it reads, by holding ``run``, until it is closed.

    Attributes:
        nodes: nodes of the graph, None if the driver cannot be asked.
    """

    def __init__(self, recorder: CudaGraphRecorder, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        self._recorder = recorder
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._run: Callable[[], None] | None = run
        self.nodes = _count_nodes(graph)

    def replay(self) -> None:
        """Launch on the current stream of the graph's device, whatever device is current."""
        if self._graph is None:
            raise RuntimeError("this graph was closed")
        self._graph.replay()

    def close(self) -> None:
        """The memory goes back when the last graph of the recorder is closed (see the recorder)."""
        if self._graph is not None:
            self._graph = self._run = None
            self._recorder._closed(self)


class CudaGraphRecorder(GraphRecorder):
    """Captures on one side stream of the model's device, whatever device is current.

    A graph that is closed, or whose capture failed, is not destroyed before all others of the recorder are closed:
    destroying it would take the cuBLAS workspace that they use, and, were it the only one, the pool.

    Args:
        device: the device of the model; without an index, the device that is current now.

    Raises:
        ValueError: not a CUDA device.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"graphs='cuda' needs a CUDA device, but the body is on {device}; valid there: 'tape', 'none', 'auto'"
            )
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream | None = None
        self._give_back: weakref.finalize[Any, Any] | None = None
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._open: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._broken: list[tuple[int, int]] = []  # pools that a broken capture was in

    @contextmanager
    def session(self) -> Iterator[None]:
        with collector_off(), self._on_stream():
            yield

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On the capture stream, ordered after the caller's stream, which then waits for it."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = borrow_stream(self.device)
                # A recorder that is dropped without being closed: its graphs are destroyed along with it.
                self._give_back = weakref.finalize(self, return_stream, self._stream)
                self._give_back.atexit = False
            stream, caller = self._stream, torch.cuda.current_stream(self.device)
            if caller == stream:
                yield
                return
            with ordered(stream, caller):
                yield

    def record(self, run: Callable[[], None]) -> CudaGraph:
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("a capture is under way on the current stream; one capture cannot hold another")
        # In a session both do nothing more.
        quiet = collector_off() if not self._in_session() else nullcontext()
        with quiet, self._on_stream():
            graph = self._capture(run)
            recorded = CudaGraph(self, graph, run)
            self._open.add(recorded)
            return recorded

    def _in_session(self) -> bool:
        return self._stream is not None and torch.cuda.current_stream(self.device) == self._stream

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # What the warm-ups took lies in the common pool, where captures cannot use it.
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        torch.cuda.synchronize(self.device)
        random = torch.cuda.default_generators[self.device.index].get_state()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._graphs.append(graph)
        # Thread-local: what other threads do on the device must not break the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            with casts_of_its_own():
                run()
        except BaseException:
            # Its own error is the one to tell; a capture that it broke cannot be ended without another.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the graph may be empty
                self._end(graph, random)
            raise
        error = self._end(graph, random)
        if error is not None:
            raise CaptureError(f"a call in the run is not allowed under capture: {error}") from error
        graph.instantiate()
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph, random: Tensor) -> RuntimeError | None:
        """End a capture, also one that a forbidden call has broken; returns what was wrong with it."""
        try:
            graph.capture_end()
            return None
        except RuntimeError as error:
            # torch 2.11 leaves the allocator in the pool when the capture was broken; later ones do not, and say so.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            # Even so 2.11 lets no other capture begin in that pool: later ones get another.
            self._broken.append(self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            self._restore_random(random)
            return error

    def _restore_random(self, before: Tensor) -> None:
        """Give torch's random generator a new inside: a broken capture leaves the old one capturing, and every random
        number after it is an error.  Graphs that were captured keep the old one."""
        fresh = torch.Generator(self.device)
        fresh.set_state(before)
        torch.cuda.default_generators[self.device.index].graphsafe_set_state(fresh)

    def _closed(self, graph: CudaGraph) -> None:
        self._open.discard(graph)
        if not self._open:
            self.close()

    def close(self) -> None:
        """Close every graph and free the pool.  The recorder can record again.

        Must not be called within a session.
        """
        for recorded in list(self._open):
            recorded._graph = recorded._run = None
        self._open.clear()
        if self._graphs:
            with torch.cuda.device(self.device):
                # A replay may still run on any stream; the memory must not go back under it.
                torch.cuda.synchronize(self.device)
                for graph in self._graphs:
                    graph.reset()
                self._graphs.clear()
                self._release_broken()
        self._pool, self._stream = None, None
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def _release_broken(self) -> None:
        """Let go of the pools of captures that were broken: up to torch 2.13 resetting them does not.

        Whether it did is seen by what is left: memory that nobody uses and that stays is held by such captures.
        """
        torch.cuda.empty_cache()
        for pool in self._broken:
            segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
            if not all(s["active_size"] for s in segments):
                with suppress(RuntimeError):
                    torch._C._cuda_releasePool(self.device.index, pool)
                torch.cuda.empty_cache()
        self._broken.clear()


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_size_t()
        status = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    except (OSError, AttributeError, RuntimeError):
        return None
    return count.value if status == 0 else None
