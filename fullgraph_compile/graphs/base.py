"""Recording and replaying a run: the interface, and the two marks that a recorder reads."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class CaptureError(RuntimeError):
    """A run does something that cannot be replayed; the message names the call."""


class RecordedGraph(ABC):
    """One captured run."""

    nodes: int | None = None

    @abstractmethod
    def replay(self) -> None:
        """Do again what was recorded, on the memory it was recorded on."""

    @abstractmethod
    def close(self) -> None:
        """Free the graph; it cannot be replayed any more."""


class GraphRecorder(ABC):
    """Records runs into graphs that share one memory pool and one stream."""

    name: ClassVar[str]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around all warm-ups and captures.

        The garbage collector is off within: a collection during a capture may destroy another graph, or free memory
        in a way that a capture forbids.
        """
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()

    @abstractmethod
    def record(self, run: Callable[[], None]) -> RecordedGraph:
        """Record one run.  It must have run before, in the session, so that nothing is made lazily in it.

        Args:
            run: reads static buffers, and copies its results into static buffers.

        Raises:
            CaptureError: the run cannot be replayed.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the pool."""


def opaque(call: F) -> F:
    """Mark a compiled piece that a recorder cannot look into: the tape records it as one call."""
    call.__full_prefill_opaque__ = True  # type: ignore[attr-defined]
    return call


_below: Callable[[], AbstractContextManager[None]] = nullcontext


def below() -> AbstractContextManager[None]:
    """Entered around what an op does inside: lets the recorder see host reads there.  Nothing if none records."""
    return _below()


@contextmanager
def watched_below(watch: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While recording: what :func:`below` enters."""
    global _below
    before, _below = _below, watch
    try:
        yield
    finally:
        _below = before
