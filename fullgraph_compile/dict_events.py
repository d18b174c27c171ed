"""Changes of dicts as Python itself tells of them, from 3.12 on: as long as it told of none, none need be looked for.

By ``PyDict_AddWatcher`` of its C interface (https://docs.python.org/3/c-api/dict.html).
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
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
_clearing = False
_changes = 0


def changes() -> float:
    """A number that is another one after any dict that is watched has changed; nan, which equals none, where that is
    not known.

    As in ``_settle``, a flag is enough: between two steps without a call or a loop no other thread gets its turn.
    """
    global _changes, _clearing
    if _clearing or _WATCHER is None:
        return math.nan
    if _told:
        _clearing = True
        try:
            _changes += 1
            _told.clear()
        finally:
            _clearing = False
    return _changes


_busy = False
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
            # No interrupt (Ctrl-C) comes between what is counted and what is to be let go of.
            others = _watched.get(at, 0)
            _watched[at] = others + 1
            self._dicts[at] = watched
            ctypes.pythonapi.PyDict_Watch(_WATCHER, ctypes.py_object(watched))

    def __del__(self) -> None:
        if _WATCHER is not None:  # else the interpreter ends, and this module may be in pieces
            _left.append(self._dicts)
            _settle()


def _settle(begin: Callable[[], None] = lambda: None) -> bool:
    """Begin to watch, and watch no more what nobody watches.

    It never waits: it may be called by the collector, in the middle of anything.

    Returns:
        False where it does nothing, as it is being done, perhaps by whoever this is called in the middle of.
    """
    global _busy
    if _busy:
        return False
    _busy = True
    try:  # no loop in here: an interrupt at its end would pass ``finally`` by (CPython 3.12, 3.13)
        begin()
        _let_go()
    finally:
        _busy = False
    if _left:  # since then
        _settle()
    return True


def _let_go() -> None:
    while _left:
        gone = _left[0]
        while gone:
            at, watched = next(iter(gone.items()))
            others = _watched[at] - 1
            if others:
                _watched[at] = others
            else:
                ctypes.pythonapi.PyDict_Unwatch(_WATCHER, ctypes.py_object(watched))
                del _watched[at]
            del gone[at]
        _left.popleft()


def _after_fork() -> None:
    """Another thread may have been at it, which is not in the child."""
    global _busy, _clearing
    _busy = _clearing = False


def _stop() -> None:
    """Be told of nothing more: nothing may be called when the interpreter ends.  Those who ask look for themselves."""
    global _WATCHER
    if _WATCHER is not None:
        watcher, _WATCHER = _WATCHER, None
        ctypes.pythonapi.PyDict_ClearWatcher(watcher)


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def available() -> bool:
    """Whether Python tells."""
    return _WATCHER is not None
