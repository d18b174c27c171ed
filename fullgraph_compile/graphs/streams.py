"""Side streams, used again rather than made anew.

cuBLAS keeps one workspace for each stream it has run on (32 MiB on Hopper), and torch drops that of a graph's capture
stream when it destroys the graph.  So a stream serves one recorder at a time: no recorder can pull the workspace from
under the graphs of another.  And streams are used again: each new one would cost another workspace.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_free: dict[int, list[torch.cuda.Stream]] = {}
_lock = threading.Lock()


def borrow_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the device that nobody else uses; the one that was returned last."""
    with _lock:
        free = _free.setdefault(device.index, [])
        return free.pop() if free else torch.cuda.Stream(device)


def return_stream(stream: torch.cuda.Stream) -> None:
    with _lock:
        _free.setdefault(stream.device.index, []).append(stream)


@contextmanager
def ordered(stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> Iterator[None]:
    """On ``stream``, ordered after what ``caller`` was given before; ``caller`` then waits for it."""
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        caller.wait_stream(stream)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On a side stream, ordered after the current one, which then waits for it: small calls of our own before a
    capture leave a workspace only where the capture needs one anyway.  Nothing on a CPU.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        here = torch.device("cuda", torch.cuda.current_device())
        stream = borrow_stream(here)
        try:
            with ordered(stream, torch.cuda.current_stream()):
                yield
        finally:
            return_stream(stream)
