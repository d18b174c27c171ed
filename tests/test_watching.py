"""What is seen of a change in dicts and objects by reading one word of each."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullgraph_compile.watching import WORKS, Watch

pytestmark = pytest.mark.skipif(not WORKS, reason="changes are not watched on this Python")


class Part(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.number = 1


class Other(Part):
    pass


def in_a_loop(m: Part) -> None:
    # Bytecode that has run often is replaced by a faster kind, which must be seen as well.
    for number in range(100):
        m.number = number


CHANGES: dict[str, Callable[[Part], Any]] = {
    "another number": lambda m: setattr(m, "number", 2),
    "an equal number of another type": lambda m: setattr(m, "number", True),
    "a number, many times": in_a_loop,
    "past the module's own setattr": lambda m: object.__setattr__(m, "number", 3),
    "in its __dict__": lambda m: vars(m).update(number=4),
    "a new attribute": lambda m: setattr(m, "added", None),
    "an attribute deleted": lambda m: delattr(m, "number"),
    "eval": lambda m: m.eval(),
    "a forward of its own": lambda m: setattr(m, "forward", print),
    "a parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2, 2))),
    "no bias": lambda m: setattr(m, "bias", None),
    "a buffer": lambda m: m.register_buffer("b", torch.ones(1)),
    "a submodule": lambda m: m.add_module("sub", nn.Identity()),
    "a forward hook": lambda m: m.register_forward_hook(print),
    "a pre-hook": lambda m: m.register_forward_pre_hook(print),
    "a hook without its method": lambda m: m._forward_hooks.update({0: print}),
    "another dict of hooks": lambda m: setattr(m, "_forward_hooks", OrderedDict()),
    "another class": lambda m: setattr(m, "__class__", Other),
    "another __dict__": lambda m: setattr(m, "__dict__", dict(vars(m))),
}


def watch(m: nn.Module) -> Watch:
    return Watch([d for d in vars(m).values() if type(d) in (dict, OrderedDict)], [m])


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in CHANGES.items()])
def test_a_change_is_seen(change: Callable[[Part], Any]) -> None:
    watched = watch(m := Part())
    vars(m), m.number, m.weight, repr(m), list(m.parameters())
    gc.collect()
    assert watched.same()
    change(m)
    assert not watched.same()


def test_a_hook_that_was_removed_is_seen() -> None:
    m = Part()
    handle = m.register_forward_hook(print)
    watched = watch(m)
    handle.remove()
    assert not watched.same()


def test_one_change_among_thousands_is_seen() -> None:
    modules = [Part() for _ in range(500)]
    watched = Watch([m._forward_hooks for m in modules], modules)
    assert watched.same()
    modules[377].number = 2
    assert not watched.same()


def test_what_is_watched_stays_alive() -> None:
    m = Part()
    watched = watch(m)
    hooks = id(m._forward_hooks)
    del m
    gc.collect()
    assert watched.same()
    assert hooks in {id(o) for o in watched._alive}


def test_what_is_compared_may_change_and_change_back() -> None:
    kept = object()
    values, items = {"a": kept, "b": 2}, [kept]
    watched = Watch([], compared=[values, items])
    for _ in range(2):
        values["a"], items[0] = None, None
        assert not watched.same()
        items[0] = kept
        assert not watched.same()
        values["a"] = kept
        assert watched.same() and watched.same()
    values["c"] = 3
    assert not watched.same()


def test_what_another_thread_changes_while_dicts_are_compared_is_seen() -> None:
    m = Part()

    class Changing(dict[str, Any]):
        def values(self) -> Any:
            m.number = 3  # as another thread might just then
            return super().values()

    values = {"a": 1}
    watched = Watch([], [m], compared=[values])
    values["a"], values["a"] = 2, 1
    watched._dicts = [(Changing(values), list(values), list(values.values()))]
    assert watched.same()
    assert not watched.same()


def test_other_defaults_of_a_function_are_seen() -> None:
    def function(x: int = 1) -> int:
        return x

    watched = Watch([], functions=[function])
    assert watched.same()
    function.__defaults__ = (2,)
    assert not watched.same()


def test_other_code_of_a_function_is_seen() -> None:
    def function() -> int:
        return 1

    watched = Watch([], functions=[function])
    assert watched.same()
    before, function.__code__ = function.__code__, (lambda: 2).__code__
    assert not watched.same()
    function.__code__ = before
    assert watched.same()


def test_another_base_or_attribute_of_a_class_is_seen() -> None:
    kind, other = (type(name, (Part,), {"number": 1}) for name in ("Kind", "Other"))
    for name, value in (("__bases__", (other,)), ("number", 2), ("added", 3)):
        watched = Watch([], classes=[kind])
        assert watched.same()
        setattr(kind, name, value)
        assert not watched.same()


def test_other_names_are_seen() -> None:
    def function() -> None: ...

    kind = type("Kind", (), {})
    watched = Watch([], named=[function, kind])
    assert watched.same() and watched.same()
    for named in (function, kind):
        before, named.__name__ = named.__name__, "other"
        assert not watched.same()
        named.__name__ = before
        assert watched.same()


def test_other_contents_of_a_cell_are_seen() -> None:
    number = 1

    def closing() -> int:
        return number

    (cell,) = closing.__closure__ or ()
    watched = Watch([], cells=[cell])
    assert watched.same()
    number = 2
    assert not watched.same()
    cell.cell_contents = 1
    assert watched.same()
    del cell.cell_contents
    assert not watched.same()
    empty = Watch([], cells=[cell])
    assert empty.same()
    cell.cell_contents = 1
    assert not empty.same()


def test_nothing_to_watch_does_not_change() -> None:
    assert Watch([]).same()
