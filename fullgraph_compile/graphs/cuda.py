"""CUDA graphs: one pool and one stream for all graphs of a recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from fullgraph_compile.graphs.base import GraphRecorder, RecordedGraph

# cuBLAS keeps a workspace for each stream, and freeing it would pull it from under other graphs captured there: so
# there is one capture stream a device, for the life of the process.
_streams: dict[int, torch.cuda.Stream] = {}


class CudaGraph(RecordedGraph):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("this graph was closed")
        self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


class CudaGraphRecorder(GraphRecorder):
    """Captures on one side stream of the model's device, whatever device is current.

    Args:
        device: the device of the model.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"CUDA graphs need a CUDA device, the model is on {device}; use graphs='tape' or 'none'")
        self.device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        with torch.cuda.device(self.device), super().session():
            stream = _streams.setdefault(index, torch.cuda.Stream(self.device))
            caller = torch.cuda.current_stream()
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                yield
            caller.wait_stream(stream)
            torch.cuda.synchronize()

    def record(self, run: Callable[[], None]) -> RecordedGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Thread-local: what other threads do on the device must not break the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            # An aborted capture leaves the stream capturing until it is ended; the error of ending it is not news.
            with suppress(RuntimeError):
                graph.capture_end()
            graph.reset()
            raise
        graph.capture_end()
        return CudaGraph(graph)

    def close(self) -> None:
        self._pool = None
