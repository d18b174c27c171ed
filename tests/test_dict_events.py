"""What Python tells of changes of dicts, from 3.12 on, and that it can be asked to stop."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from fullgraph_compile import dict_events
from fullgraph_compile.dict_events import DictEvents, available, changes
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
    events = DictEvents.of([d])
    before = changes()
    dict(d), d.get("a"), list(d.items()), "a" in d, repr(d), d.__setitem__("a", d["a"])
    assert changes() == before
    change(d)
    assert changes() != before
    del events


def test_a_change_in_another_thread_is_told() -> None:
    d: dict[str, int] = {}
    events = DictEvents.of([d])
    before = changes()
    thread = threading.Thread(target=d.update, kwargs={"a": 1})
    thread.start(), thread.join()
    assert changes() != before
    del events


def test_nothing_is_told_of_what_nobody_watches_any_more() -> None:
    d: dict[str, int] = {}
    one, other = DictEvents.of([d]), DictEvents.of([d, d])
    del one
    gc.collect()
    before = changes()
    d["a"] = 1
    assert changes() == before + 1
    del other
    before = changes()
    d["a"] = 2
    assert changes() == before and id(d) not in dict_events._watched


def test_the_end_of_a_dict_is_not_told() -> None:
    class Dict(dict[str, Any]):
        pass

    d = Dict()
    gone = weakref.ref(d)
    events = DictEvents.of([d])
    del d
    assert gone() is not None
    before = changes()
    del events
    assert gone() is None and changes() == before


def test_an_exception_on_its_way_arrives_while_what_is_watched_ends() -> None:
    class Holder:
        def __init__(self) -> None:
            self.mine: dict[str, Any] = {"a": 1}
            self.events = DictEvents.of([self.mine])
            self.mine["events"] = self.events  # found by the collector

    def broken(_: Any) -> None:
        gc.collect()
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            list(map(broken, [Holder()]))
    gc.collect()


def test_the_handler_of_a_signal_is_not_run_in_the_middle_of_a_change() -> None:
    class Timeout(Exception):
        pass

    def handler(*_: Any) -> None:
        raise Timeout

    d = {"a": 1.0}
    events = DictEvents.of([d])
    before, plain = changes(), signal.signal(signal.SIGUSR1, handler)
    send = getattr(ctypes.PyDLL(None), "raise")  # leaves it to the next step in Python
    try:
        with pytest.raises(Timeout):
            d.update(zip(["a"], map(float, map(send, [signal.SIGUSR1])), strict=True))
    finally:
        signal.signal(signal.SIGUSR1, plain)
    assert d == {"a": 0.0} and changes() != before
    del events


def test_threads_change_one_dict() -> None:
    d: dict[str, Any] = {}
    events = DictEvents.of([d])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(i: int) -> None:
        for n in range(20_000):
            d["shared"] = [n]
            d[f"own {i} {n % 100}"] = [n]
            if n % 1000 == 0:
                d.clear()

    try:
        threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
        for thread in threads:
            thread.start()
        seen = {changes()}
        while any(thread.is_alive() for thread in threads):
            seen.add(changes())
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(seen) > 1
    before = changes()
    d["shared"] = None
    assert changes() != before
    del events


def test_many_that_end_while_others_begin() -> None:
    """In threads, and by the collector at any step."""
    shared: list[dict[int, int]] = [{} for _ in range(20)]
    threshold = gc.get_threshold()
    gc.set_threshold(5)
    kept = DictEvents.of(shared)

    def work() -> None:
        for i in range(200):
            ring: list[Any] = [DictEvents.of([*shared[i % 7 :], {}])]
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
    assert dict_events._settle()  # what threads left to each other
    assert all(dict_events._watched[id(d)] == 1 for d in shared)
    for d in shared:
        before = changes()
        d[0] = 1
        assert changes() == before + 1
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
import atexit, ctypes, torch  # which takes one for itself

def at_the_very_end():
    assert again.same()
    d["a"] = 3
    print("seen" if not again.same() else "missed")

atexit.register(at_the_very_end)  # before ours, so it runs after it

{before}
from fullgraph_compile.dict_events import DictEvents, available
from fullgraph_compile.watching import WORKS, Watch
d = {{"a": 1}}
events = DictEvents.of([globals()])  # which are taken apart at the end
watched = Watch([d, vars(ctypes)])
assert watched.same()
d["a"] = 2
assert not watched.same() and WORKS
again = Watch([d])
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
    assert (done.returncode, done.stdout.split()) == (0, [str(not taken), "seen"]), done.stderr
    assert "Exception" not in done.stderr


def test_a_child_goes_on_where_another_thread_was_at_it_as_it_was_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dict_events, "_busy", True)
    monkeypatch.setattr(dict_events, "_clearing", True)
    assert DictEvents.of([{}]) is None and Watch([{}]).same()
    child = os.fork()
    if not child:
        d: dict[str, int] = {}
        watched = Watch([d])
        fine = watched._events is not None and watched.same() and changes() == changes()
        d["a"] = 1
        os._exit(0 if fine and not watched.same() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_interrupt_at_any_step_leaves_it_able_to_go_on() -> None:
    class Interrupt(Exception):
        pass

    def handler(*_: Any) -> None:
        raise Interrupt

    d = {"a": 1}
    plain, hook = signal.signal(signal.SIGALRM, handler), sys.unraisablehook
    sys.unraisablehook = lambda _: None  # what is raised within __del__
    try:
        for i in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + i % 100 * 3e-6)
                for _ in range(200):
                    Watch([d])
            except Interrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert not dict_events._busy and not dict_events._clearing
    except Interrupt:  # between the two lines that begin and end it
        pass
    finally:
        signal.signal(signal.SIGALRM, plain)
        sys.unraisablehook = hook
    free = threading.Thread(target=lambda: seen.append(Watch([d]).same()))
    seen: list[bool] = []
    free.start(), free.join(10)
    assert seen == [True]
