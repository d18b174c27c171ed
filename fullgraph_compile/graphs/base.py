"""Recording and replaying a run: the interface, and the two marks that a recorder reads."""

from __future__ import annotations

import functools
import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


class CaptureError(RuntimeError):
    """A run does something that cannot be replayed; the message names the call."""


class RecordedGraph(ABC):
    """One captured run.

    Attributes:
        nodes: what a replay launches, in nodes of the graph; None where it cannot be read.
    """

    nodes: int | None = None

    @abstractmethod
    def replay(self) -> None:
        """Do again what was recorded, on the memory that it was recorded on.

        Raises:
            RuntimeError: the graph was closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the graph and of all that it reads; it cannot be replayed any more.  Twice is once."""


class GraphRecorder(ABC):
    """Records runs into graphs that share one memory pool and one stream.

    What a graph makes inside is memory of the pool: any replay of any graph of the recorder may overwrite it.  So a
    run copies its results into static buffers, which are the caller's.
    """

    name: ClassVar[str]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around all warm-ups and captures: garbage is collected once, then not until the session ends."""
        with collector_off():
            yield

    @abstractmethod
    def record(self, run: Callable[[], None]) -> RecordedGraph:
        """Record one run.  It must have run before, in the session, so that nothing is made lazily in it.

        Neither the memory that the run writes nor the random generators are changed by recording it.

        Args:
            run: reads static buffers, and copies its results into static buffers.

        Raises:
            CaptureError: the run cannot be replayed.  Other exceptions of ``run`` pass through.  Either way the
                recorder and the graphs that it has recorded stay usable.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every graph and free the pool.  The recorder can record again."""


@contextmanager
def collector_off(*, collect: bool = True) -> Iterator[None]:
    """Collect garbage, then keep the collector off; its state is restored after success and after an exception.

    A collection during a capture may destroy another graph or unload a kernel, which ends the capture.

    Args:
        collect: False only keeps it off.
    """
    was_on = gc.isenabled()
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def casts_of_its_own() -> Iterator[None]:
    """Around a recorded run: weights that autocast has cast before, and keeps, are cast in the run itself, or a replay
    would read what they were; and what it keeps of the run, which is memory of the pool, it forgets."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


class Listener(Protocol):
    """What a recorder that looks into a run is told of it."""

    def below(self) -> AbstractContextManager[None]:
        """See host reads in what an op does inside."""

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that cannot be looked into, and record it as one."""


class _Here(threading.local):
    listener: Listener | None = None


_here = _Here()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While this thread records.

    Raises:
        CaptureError: this thread records already.
    """
    if _here.listener is not None:
        raise CaptureError("a recording is under way in this thread; one recording cannot hold another")
    _here.listener = listener
    try:
        yield
    finally:
        _here.listener = None


def opaque(fn: F) -> F:
    """Mark a compiled piece, whose kernels a recorder cannot look into: the tape records it as one call.

    ``fn`` must be pure in its arguments; integers among them are frozen.  CUDA graphs need no mark.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        listener = _here.listener
        return fn(*args, **kwargs) if listener is None else listener.call(fn, args, kwargs)

    return cast(F, call)


def below() -> AbstractContextManager[None]:
    """Entered around what an op does inside: lets a recorder see host reads there.  Nothing if none records."""
    listener = _here.listener
    return nullcontext() if listener is None else listener.below()
