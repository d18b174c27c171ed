"""Changes of dicts as Python itself tells of them, from 3.12 on: as long as it told of none, none need be looked for.

By ``PyDict_AddWatcher`` of its C interface (https://docs.python.org/3/c-api/dict.html).
"""

from __future__ import annotations

import atexit
import ctypes
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from fullgraph_compile.fields import READABLE

_told: set[int] = set()
# Called in the middle of a change.  A step in Python would not do: there the collector, the handler of a signal or
# another thread may get its turn, and change the same dict.  Of four arguments the first is taken, the kind of the
# change; from ``add`` comes None, which is 0 in C: all is well.
_TELL = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(_told.add)


def _register() -> int | None:
    """The number of our watcher; None where there is none to be had: an interpreter has eight."""
    if not READABLE or sys.version_info < (3, 12):
        return None
    try:
        return int(ctypes.pythonapi.PyDict_AddWatcher(_TELL))
    except (AttributeError, RuntimeError):
        return None


_WATCHER = _register()
_reading = threading.RLock()
_clearing = False
_changes = 0


def changes() -> float:
    """A number that is another one after any dict that is watched has changed; nan, which equals none, where that is
    not known."""
    global _changes, _clearing
    with _reading:
        if _clearing or _WATCHER is None:  # asked by what the collector runs in the middle of this
            return math.nan
        if _told:
            _clearing = True
            try:
                # In this order.  What it tells of in between is forgotten, but nobody has the new number before.
                _changes += 1
                _told.clear()
            finally:
                _clearing = False
        return _changes


_lock = threading.RLock()
_busy = False  # whether the thread that has the lock is at it already
_watched: dict[int, int] = {}  # by how many, of each dict that is watched
_left: deque[dict[int, dict[Any, Any]]] = deque()  # of those that are gone, and watch nothing any more


class DictEvents:
    """Has Python tell of changes of some dicts as long as it lives.

    It keeps them alive, and they are not watched any more when it lets go of them: Python tells of the end of a dict
    too, perhaps while an exception is on its way, where nothing may be called.
    """

    def __init__(self) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {}

    @classmethod
    def of(cls, dicts: Iterable[dict[Any, Any]]) -> DictEvents | None:
        """Begins to watch dicts; None where they cannot be, or not now."""
        made = cls()
        return made if _WATCHER is not None and _settle(lambda: made._watch(dicts)) else None

    def _watch(self, dicts: Iterable[dict[Any, Any]]) -> None:
        for at, watched in {id(d): d for d in dicts}.items():
            # In this order, and though others may watch it: after an interrupt (Ctrl-C) in here, or where it is let go
            # of, it may be watched for longer than need be, and be counted when it is gone.
            ctypes.pythonapi.PyDict_Watch(_WATCHER, ctypes.py_object(watched))
            _watched[at] = _watched.get(at, 0) + 1
            self._dicts[at] = watched

    def __del__(self) -> None:
        if _WATCHER is not None:  # else the interpreter ends, and this module may be in pieces
            _left.append(self._dicts)
            _settle()


def _settle(begin: Callable[[], None] = lambda: None) -> bool:
    """Begin to watch, and watch no more what nobody watches.

    Returns:
        False where it does nothing, as it is called in the middle of itself, by what the collector finds; what is left
        to do is done by the outer call.
    """
    global _busy
    with _lock:
        if _busy:
            return False
        _busy = True
        try:  # no loop in here: an interrupt at its end would pass ``finally`` by (CPython 3.12, 3.13)
            begin()
            _let_go()
        finally:
            _busy = False
    return True


def _let_go() -> None:
    while _left:
        for at, watched in _left.popleft().items():
            others = _watched[at] - 1
            if others:
                _watched[at] = others
            else:
                del _watched[at]
                ctypes.pythonapi.PyDict_Unwatch(_WATCHER, ctypes.py_object(watched))


def _stop() -> None:
    """Be told of nothing more: nothing may be called when the interpreter ends.  Those who ask look for themselves."""
    global _WATCHER
    if _WATCHER is not None:
        watcher, _WATCHER = _WATCHER, None
        ctypes.pythonapi.PyDict_ClearWatcher(watcher)


atexit.register(_stop)


def available() -> bool:
    """Whether Python tells."""
    return _WATCHER is not None
