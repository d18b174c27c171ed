"""Ways to record a run and replay it."""

from __future__ import annotations

import torch

from fullgraph_compile.graphs.base import CaptureError, GraphRecorder, RecordedGraph, below, opaque

KINDS = ("cuda", "tape", "none")


def create_recorder(kind: str, device: torch.device) -> GraphRecorder | None:
    """A recorder for runs on ``device``.

    Args:
        kind: "cuda", "tape" or "none".
        device: where the body runs.

    Returns:
        None for "none".

    Raises:
        ValueError: an unknown kind, or CUDA graphs for a device that is not a CUDA device.
    """
    if kind == "none":
        return None
    if kind == "tape":
        from fullgraph_compile.graphs.tape import TapeRecorder

        return TapeRecorder(device)
    if kind == "cuda":
        from fullgraph_compile.graphs.cuda import CudaGraphRecorder

        return CudaGraphRecorder(device)
    raise ValueError(f"graphs={kind!r} is not one of {', '.join(map(repr, KINDS))}")


__all__ = ["KINDS", "CaptureError", "GraphRecorder", "RecordedGraph", "below", "create_recorder", "opaque"]
