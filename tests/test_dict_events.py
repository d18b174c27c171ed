"""What Python tells of changes of dicts, from 3.12 on, and that it can be asked to stop."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from fullgraph_compile import dict_events
from fullgraph_compile.dict_events import DictEvents, available, told
from fullgraph_compile.watching import Watch
from fullgraph_compile.words import Words

pytestmark = pytest.mark.skipif(not available(), reason="before Python 3.12 nothing is told")


class Kept:
    """With attributes that are set without a call."""

    def __init__(self) -> None:
        self.a = 1


def attribute_many_times(d: dict[str, Any]) -> None:
    kept = Kept()
    vars(kept)
    kept.__dict__ = d
    # Bytecode that has run often is replaced by a faster kind.
    for number in range(100):
        kept.a = number


def global_name(d: dict[str, Any]) -> None:
    code = compile("global a\na = 3", "", "exec")
    for _ in range(100):
        exec(code, d)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "set": lambda d: d.__setitem__("a", 2),
    "add": lambda d: d.__setitem__("new", 2),
    "delete": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault("new"),
    "update": lambda d: d.update(a=3),
    "update from another": lambda d: d.update({"a": 3, "c": 4}),
    "or": lambda d: d.__ior__({"c": 4}),
    "clear": lambda d: d.clear(),
}


# Attributes and globals are in plain dicts.
OF_PLAIN = {"an attribute, many times": attribute_many_times, "a global name": global_name}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *(
            pytest.param(c, kind, id=f"{kind.__name__}: {n}")
            for kind in (dict, OrderedDict)
            for n, c in CHANGES.items()
        ),
        *(pytest.param(c, dict, id=f"dict: {n}") for n, c in OF_PLAIN.items()),
    ],
)
def test_every_change_is_told(change: Callable[[dict[str, Any]], Any], kind: type[dict[str, Any]]) -> None:
    d = kind(a=1, b=2)
    exec("", d)  # adds the builtins
    events = DictEvents([d])
    before = told[0]
    dict(d), d.get("a"), list(d.items()), "a" in d, repr(d), d.__setitem__("a", d["a"])
    assert told[0] == before
    change(d)
    assert told[0] > before
    del events


def test_a_change_in_another_thread_is_told() -> None:
    d: dict[str, int] = {}
    events = DictEvents([d])
    before = told[0]
    thread = threading.Thread(target=d.update, kwargs={"a": 1})
    thread.start(), thread.join()
    assert told[0] > before
    del events


def test_nothing_is_told_of_what_nobody_watches_any_more() -> None:
    d: dict[str, int] = {}
    one, other = DictEvents([d]), DictEvents([d, d])
    del one
    gc.collect()
    before = told[0]
    d["a"] = 1
    assert told[0] == before + 1
    del other
    before = told[0]
    d["a"] = 2
    assert told[0] == before and id(d) not in dict_events._watched


def test_the_end_of_a_dict_is_not_told() -> None:
    class Dict(dict[str, Any]):
        pass

    d = Dict()
    gone = weakref.ref(d)
    events = DictEvents([d])
    del d
    assert gone() is not None
    before = told[0]
    del events
    assert gone() is None and told[0] == before


def test_an_exception_on_its_way_arrives_while_what_is_watched_ends() -> None:
    class Holder:
        def __init__(self) -> None:
            self.mine: dict[str, Any] = {"a": 1}
            self.events = DictEvents([self.mine])
            self.mine["events"] = self.events  # found by the collector

    def broken(_: Any) -> None:
        gc.collect()
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            list(map(broken, [Holder()]))
    gc.collect()


def test_many_that_end_while_others_begin() -> None:
    """In threads, and by the collector at any step."""
    shared: list[dict[int, int]] = [{} for _ in range(20)]
    threshold = gc.get_threshold()
    gc.set_threshold(5)
    kept = DictEvents(shared)

    def work() -> None:
        for i in range(200):
            ring: list[Any] = [DictEvents([*shared[i % 7 :], {}])]
            ring.append(ring)

    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert all(dict_events._watched[id(d)] == 1 for d in shared)
    for d in shared:
        before = told[0]
        d[0] = 1
        assert told[0] == before + 1
    del kept
    assert not any(id(d) in dict_events._watched for d in shared)


def test_dicts_are_looked_at_only_after_something_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    d, other = {"a": 1}, {"a": 1}
    watched, unlike = Watch([d]), Watch([other])
    looked: list[Words] = []
    plain = Words.same
    monkeypatch.setattr(Words, "same", lambda words: looked.append(words) or plain(words))
    for _ in range(3):
        assert watched.same()
    assert watched._versions not in looked
    other["a"] = 2
    # Of which dict it was told is not kept: that is read once.
    assert watched.same() and watched.same()
    assert looked.count(watched._versions) == 1
    assert not unlike.same() and not unlike.same()


SCRIPT = """
import ctypes, torch  # which takes one for itself
{before}
from fullgraph_compile.dict_events import DictEvents, available
from fullgraph_compile.watching import WORKS, Watch
d = {{"a": 1}}
events = DictEvents([globals()]) if available() else None  # which are taken apart at the end
watched = Watch([d, vars(ctypes)])
assert watched.same()
d["a"] = 2
assert not watched.same() and WORKS
print(available())
"""


@pytest.mark.parametrize("taken", [False, True])
def test_where_no_watcher_is_left_and_at_the_end_of_the_interpreter(taken: bool) -> None:
    before = """
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3)
nothing = kind(lambda *_: 0)
try:
    while True:
        ctypes.pythonapi.PyDict_AddWatcher(nothing)
except RuntimeError:
    pass
"""
    script = SCRIPT.format(before=before if taken else "")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(not taken)), done.stderr
    assert "Exception" not in done.stderr
