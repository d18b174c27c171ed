"""Whether any of many dicts, or objects, has changed: one read of a word of memory for each."""

from __future__ import annotations

import math
import operator
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from fullgraph_compile.dict_events import DictEvents, changes
from fullgraph_compile.fields import BASES, CODE, CONTENTS, DEFAULTS, READABLE, attributes_of
from fullgraph_compile.words import Words, word

# Where CPython keeps what is read here, in bytes from the address of the object.
_TYPE = 8  # of any object: its type
_VERSION = 24  # of a dict: a number that no other state of any dict has had (PEP 509)
_VALUES = 40  # of a dict: its values, where they are apart from its keys
_MANAGED_DICT = -24  # of an object: its ``__dict__``, from Python 3.11 on


class Watch:
    """Tells whether dicts and objects are as they were when it was made.

    Of a dict, a key or a value that was added, removed or replaced is seen, also by an equal one; of an object, another
    class or another ``__dict__``.  What lies deeper is not: values that may themselves change must be watched too.
    That an ``OrderedDict`` only changes its order is not seen.

    It keeps all of them alive, so that the memory that it reads is theirs.

    Args:
        dicts: plain or ordered dicts.
        objects: any that have a ``__dict__``.
        compared: dicts and lists that are looked through at each asking, so that a change that was undone is none.
        functions: other code in one of these is seen, and other defaults.
        classes: an attribute of one of these that was added, removed or replaced is seen, and other bases.
        cells: other contents of one of these, which functions close over, are seen.
        named: another name of one of these functions and classes is seen.

    Raises:
        ValueError: an object keeps its ``__dict__`` elsewhere than others do.
    """

    def __init__(
        self,
        dicts: Iterable[dict[str, Any]],
        objects: Iterable[Any] = (),
        compared: Iterable[dict[str, Any] | list[Any]] = (),
        functions: Iterable[Any] = (),
        classes: Iterable[type] = (),
        cells: Iterable[Any] = (),
        named: Iterable[Any] = (),
    ) -> None:
        objects, functions, classes = list(objects), list(functions), list(classes)
        cells, named = list(cells), list(named)
        self._names = named, list(map(_name_of, named))  # with what each has now
        compared = list(compared)
        self._lists = [(c, list(c)) for c in compared if isinstance(c, list)]
        self._dicts = [(c, list(c), list(c.values())) for c in compared if isinstance(c, dict)]
        own = [vars(o) for o in objects]
        if sys.version_info >= (3, 13):
            for attributes in own:
                _make_whole(attributes)
        self._alive = [*objects, *own, *dicts, *map(attributes_of, classes)]
        # As long as they are in these states, they need not be looked through.
        self._states = {id(c) + _VERSION for c, _, _ in self._dicts}
        watched = [*self._alive[len(objects) :], *(c for c, _, _ in self._dicts)]
        # Until Python tells of a change of one, none need be looked at.
        self._events = DictEvents.of(watched)
        self._changes = changes()
        self._versions = Words(id(d) + _VERSION for d in watched)
        words: set[int] = set()
        for obj, attributes in zip(objects, own, strict=True):
            at = id(obj) + (_MANAGED_DICT if type(obj).__dictoffset__ < 0 else type(obj).__dictoffset__)
            if word(at) != id(attributes) or word(id(obj) + _TYPE) != id(type(obj)):
                raise ValueError(f"a {type(obj).__name__} does not keep its __dict__ where others do")
            words |= {at, id(obj) + _TYPE}
        # Read as words, not by their names: Python 3.12 tells its audit of each read of a function's code.
        for owners, field in ((functions, CODE), (functions, DEFAULTS), (classes, BASES), (cells, CONTENTS)):
            for owner in owners:
                words.add(field.place(owner))
                self._alive += (owner, *field.held(owner))
        self._words = Words(words)

    def same(self) -> bool:
        """Whether nothing has changed."""
        if not self._words.same():
            return False
        now = math.nan if self._events is None else changes()
        if now != self._changes:
            if not self._versions.same() and not self._changed_back():
                return False
            self._changes = now
        named, names = self._names
        if named and not all(map(operator.is_, map(_name_of, named), names)):
            return False
        for items, before in self._lists:
            if len(items) != len(before) or not all(map(operator.is_, items, before)):
                return False
        return True

    def _changed_back(self) -> bool:
        """Whether only dicts that are compared have changed, and hold what they held, in the same order."""
        read = self._versions.read()
        if not self._states.issuperset(self._versions.others(read)):
            return False
        for now, keys, values in self._dicts:
            if len(now) != len(keys) or not all(map(operator.is_, now.values(), values)):
                return False
            if not all(map(operator.is_, now, keys)):
                return False
        # As they were before they were looked through: another thread may have changed one since.
        self._versions.then = read
        return True


_name_of = operator.attrgetter("__name__")


def _make_whole(attributes: dict[Any, Any]) -> None:
    """Let a dict of attributes keep its own values.

    From Python 3.13 on an object keeps them within itself, and to set one is no new state of the dict.  A key that is
    no string has no place there.
    """
    if word(id(attributes) + _VALUES):
        key = object()
        attributes[key] = None
        del attributes[key]


class _Sample:
    pass


def _changes(target: _Sample) -> Iterator[tuple[Any, Any]]:
    """Something to do, each followed by its effect on ``target`` or on its dict ``inner``."""
    own: dict[str, Any] = vars(target)
    inner: OrderedDict[str, Any] = own["inner"]
    yield setattr, (target, "number", 2.0)
    yield setattr, (target, "added", None)
    yield delattr, (target, "added")
    yield own.__setitem__, ("number", True)
    yield own.update, ({"number": 1},)
    yield inner.__setitem__, ("a", 1)
    yield inner.__setitem__, ("a", 2)
    yield inner.__delitem__, ("a",)
    yield inner.update, ({"b": 1},)
    yield inner.clear, ()
    yield setattr, (target, "__class__", type("Other", (_Sample,), {}))
    yield setattr, (target, "__dict__", dict(own))


def _changes_of_fields() -> Iterator[Watch]:
    """What watched a class, a function or a cell that has changed since."""

    def function(number: int = 1) -> Any:
        return lambda: number

    cell: Any = function().__closure__[0]
    kind = type("Kind", (_Sample,), {"number": 1})
    code = (lambda number: None).__code__
    changes: list[tuple[str, Any, str, Any]] = [
        ("classes", kind, "number", 2),
        ("classes", kind, "__bases__", (type("Other", (_Sample,), {}),)),
        ("functions", function, "__defaults__", None),
        ("functions", function, "__code__", code),
        ("cells", cell, "cell_contents", 2),
    ]
    for what, owner, name, value in changes:
        watch = Watch([], **{what: [owner]})
        setattr(owner, name, value)
        yield watch


def _works() -> bool:
    """Tries every kind of change: what is read is CPython's own business, and 3.14 keeps no state of a dict."""
    if not READABLE:
        return False
    target = _Sample()
    target.number, target.inner = 1, OrderedDict()  # type: ignore[attr-defined]
    try:
        for change, args in _changes(target):
            watch = Watch([vars(target)["inner"]], [target])
            if not watch.same():
                return False
            change(*args)
            if watch.same():
                return False
        for changed in _changes_of_fields():
            if changed.same():
                return False
    except ValueError:
        return False
    return True


WORKS = _works()
"""Whether changes can be watched on this Python: CPython 3.10 to 3.13."""
