"""Changes of dicts as Python itself tells of them, from 3.12 on: as long as it told of none, none need be looked for.

By ``PyDict_AddWatcher`` of its C interface (https://docs.python.org/3/c-api/dict.html).
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from fullgraph_compile.fields import READABLE

told = [0]
"""How often it told of a change of any dict that is watched."""


def _note(event: int, changed: Any, key: Any, value: Any) -> int:
    # It is told of a change right before that is made.  No call and no loop comes after the count, so the lock of the
    # interpreter stays with this thread until it is made: who reads another count finds the dict changed.
    told[0] += 1
    return 0


_NOTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(_note)


def _register() -> int | None:
    """The number of our watcher; None where there is none to be had: an interpreter has eight."""
    if not READABLE or sys.version_info < (3, 12):
        return None
    try:
        return int(ctypes.pythonapi.PyDict_AddWatcher(_NOTE))
    except (AttributeError, RuntimeError):
        return None


_WATCHER = _register()
_lock = threading.Lock()
_watched: dict[int, int] = {}  # by how many, of each dict that is watched
_left: deque[dict[int, dict[Any, Any]]] = deque()  # of those that are gone, and watch nothing any more


class DictEvents:
    """Has Python tell of changes of some dicts as long as it lives.

    It keeps them alive, and they are not watched any more when it lets go of them: Python tells of the end of a dict
    too, perhaps while an exception is on its way, where nothing may be called.

    Args:
        dicts: the dicts.
    """

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {}
        with _lock:
            for at, watched in {id(d): d for d in dicts}.items():
                # In this order: an interrupt (Ctrl-C) in between leaves it watched for longer than need be.
                others = _watched.get(at, 0)
                if not others:
                    ctypes.pythonapi.PyDict_Watch(_WATCHER, ctypes.py_object(watched))
                _watched[at] = others + 1
                self._dicts[at] = watched
        _leave()

    def __del__(self) -> None:
        if _WATCHER is not None:  # else the interpreter ends, and this module may be in pieces
            _left.append(self._dicts)
            _leave()


def _leave() -> None:
    """Watch no more what nobody watches.  Called when an object ends, which may be in the middle of anything: where
    another has the lock it is left to that."""
    while _left and _lock.acquire(blocking=False):
        try:
            while _left:
                for at, watched in _left.popleft().items():
                    _watched[at] -= 1
                    if not _watched[at]:
                        del _watched[at]
                        ctypes.pythonapi.PyDict_Unwatch(_WATCHER, ctypes.py_object(watched))
        finally:
            _lock.release()


def _stop() -> None:
    """Be told of nothing more: nothing may be called when the interpreter ends."""
    global _WATCHER
    if _WATCHER is not None:
        ctypes.pythonapi.PyDict_ClearWatcher(_WATCHER)
        _WATCHER = None


atexit.register(_stop)


def available() -> bool:
    """Whether Python tells."""
    return _WATCHER is not None
