"""Ctrl-C that is not lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pressed = False


@contextmanager
def remembered() -> Iterator[None]:
    """Inside, Ctrl-C is remembered, besides being raised: what is raised in a finalizer is dropped by Python.

    Where Ctrl-C does something else than to raise, that is left as it is.
    """
    global _pressed
    _pressed = False
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _press(number: int, frame: FrameType | None) -> None:
    global _pressed
    _pressed = True
    raise KeyboardInterrupt


def raise_if_interrupted() -> None:
    """Raise ``KeyboardInterrupt`` where one was remembered; asked between measurements."""
    if _pressed:
        raise KeyboardInterrupt
