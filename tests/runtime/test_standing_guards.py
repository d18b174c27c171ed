"""What a forward reads besides its arguments may change in many places; a call after the change is never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile.compiled_body import compiled_body
from fullgraph_compile.variant import Variant
from fullgraph_compile.watching import WORKS
from tests.models import T2, tiny
from tests.runtime.bodies import check, equal, first, ready, replays, run

watched = pytest.mark.skipif(not WORKS, reason="changes are not watched on this Python")

FACTOR = 1.5
FACTORS = {"inner": 1.25}


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


def times(by: float) -> Any:
    def decorate(forward: Any) -> Any:
        def closing(self: Any, x: Tensor) -> Tensor:
            return forward(self, x) * by

        return closing

    return decorate


class Settings:
    of_kind = 0.8

    @property
    def called(self) -> float:
        return self.number

    def __init__(self) -> None:
        self.number = 2.0
        self.numbers = [0.5, 3.0]
        self.deep = {"number": 0.75}


class Reader(nn.Module):
    """Reads numbers from wherever a forward may read them."""

    of_class = 1.1

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.own = 0.9
        self.listed = [1.2, 1.3]
        self.pair = (1.0, 0.7)
        self.named = {"a": 1.4}
        self.function = scaled
        self.flag = False

    @times(1.05)
    def forward(self, x: Tensor) -> Tensor:
        x = x * self.own * self.of_class * FACTOR * FACTORS["inner"]
        x = x * self.settings.called * self.settings.of_kind + hasattr(self.settings, "bonus")
        x = x * self.settings.numbers[1] * self.settings.deep["number"]
        x = self.function(x * self.listed[0] * self.pair[1] * self.named["a"])
        x = -x if self.flag else x
        x = x + len(Settings.__name__) + len(scaled.__name__)
        return x + len(self.listed) + hasattr(self, "extra")


class Reads(T2):
    """Two layers, each with a reader of its own."""

    def __init__(self) -> None:
        super().__init__(layers=2, hidden=8, heads=2)
        settings = Settings()
        for layer in self.layers:
            layer.mlp = Reader(settings)


class Slotted:
    """What its attributes are cannot be watched."""

    __slots__ = ("listed",)

    def __init__(self, listed: list[float]) -> None:
        self.listed = listed


class Shares(nn.Module):
    """Has a list that others have too."""

    def __init__(self, listed: list[float], slotted: Slotted) -> None:
        super().__init__()
        self.listed, self.slotted = listed, slotted

    def forward(self, x: Tensor) -> Tensor:
        return x * self.listed[0] * self.slotted.listed[1]


class Negated(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def negative(x: Tensor, by: float = 1.0) -> Tensor:
    return -x


def last(m: Any) -> Any:
    return m.layers[1].mlp


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number of a module": lambda m: setattr(last(m), "own", 1.9),
    "a flag": lambda m: setattr(last(m), "flag", True),
    "a list in a module": lambda m: last(m).listed.__setitem__(0, 2.2),
    "a dict in a module": lambda m: last(m).named.update(a=2.4),
    "a function in a module": lambda m: setattr(last(m), "function", negative),
    "an attribute that was not there": lambda m: setattr(last(m), "extra", None),
    "a number of an object": lambda m: setattr(last(m).settings, "number", 2.5),
    "an attribute that an object did not have": lambda m: setattr(last(m).settings, "bonus", None),
    "a dict of an object": lambda m: last(m).settings.deep.update(number=0.25),
    "an object": lambda m: setattr(last(m), "settings", copy.deepcopy(last(m).settings).__class__()),
    "a class": lambda m: setattr(last(m), "__class__", Negated),
    "a __dict__": lambda m: setattr(last(m), "__dict__", {**vars(last(m)), "own": 0.35}),
    "a hook": lambda m: last(m).register_forward_hook(lambda _m, _a, out: out + 1),
    "a hook past its method": lambda m: last(m)._forward_hooks.update({77: lambda _m, _a, out: out * 2}),
    "a pre-hook": lambda m: m.layers[0].norm2.register_forward_pre_hook(lambda _m, args: (args[0] + 1,)),
    "a hook with keyword arguments": lambda m: m.layers[0].norm1.register_forward_hook(
        lambda _m, _args, _kwargs, out: out * 1.5, with_kwargs=True
    ),
    "a pre-hook with keyword arguments": lambda m: m.layers[1].norm1.register_forward_pre_hook(
        lambda _m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    ),
    "a submodule": lambda m: setattr(m.layers[0], "mlp", nn.Tanh()),
}


def test_a_change_of_the_module_is_followed_wherever_it_is() -> None:
    module = Reads().eval()
    eager = copy.deepcopy(module)
    body = ready("compile", module, buckets=[8])
    check(body, eager, 7, 5)
    for name, change in CHANGES.items():
        before = run(eager, 7)
        change(module), change(eager)
        assert not torch.equal(run(eager, 7), before), name
        for n in (7, 5):
            got, want = run(body, n), run(eager, n)
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), name


def test_hooks_for_a_backward_change_nothing() -> None:
    module = tiny("Llama", num_hidden_layers=2)
    eager = copy.deepcopy(module)
    body = ready("compile", module, buckets=[8], strict=True)
    check(body, eager, 7, 5)
    start, compiles = replays(body), fgc.report(body).compiles
    for m in (body, eager):
        m.layers[0].mlp.register_full_backward_hook(lambda *_: pytest.fail("called"))
        m.layers[0].register_full_backward_pre_hook(lambda *_: pytest.fail("called"))
        m.layers[1].mlp.register_backward_hook(lambda *_: pytest.fail("called"))
    check(body, eager, 7, 5)
    assert (replays(body), fgc.report(body).compiles) == (start + 2, compiles)


def test_a_change_outside_of_the_module_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Reads().eval()
    eager = copy.deepcopy(module)
    body = ready("compile", module, buckets=[8])
    here = globals()
    code = scaled.__code__
    forward: Any = Reader.forward
    held = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))["by"]
    changes: dict[str, Callable[[], Any]] = {
        "a global number": lambda: monkeypatch.setitem(here, "FACTOR", 0.5),
        "a global dict": lambda: monkeypatch.setitem(FACTORS, "inner", 2.5),
        "a number of a class": lambda: monkeypatch.setattr(Reader, "of_class", -1.0),
        "a number of an object's class": lambda: monkeypatch.setattr(Settings, "of_kind", 0.3),
        "a property of an object's class": lambda: monkeypatch.setattr(Settings, "called", property(lambda self: 5.0)),
        "the code of a function": lambda: setattr(scaled, "__code__", negative.__code__),
        "the code back": lambda: setattr(scaled, "__code__", code),
        "what a function closes over": lambda: setattr(held, "cell_contents", 0.6),
        "what it closes over back": lambda: setattr(held, "cell_contents", 1.05),
    }
    if torch.__version__ >= (2, 12):
        # The Dynamo of torch 2.11 puts no guard on defaults and names: a plain torch.compile follows neither.
        changes["the defaults of a function"] = lambda: setattr(scaled, "__defaults__", (0.3,))
        changes["the defaults back"] = lambda: setattr(scaled, "__defaults__", (1.0,))
        changes["the name of a class"] = lambda: setattr(Settings, "__name__", "S")
        changes["the name back"] = lambda: setattr(Settings, "__name__", "Settings")
        changes["the name of a function"] = lambda: monkeypatch.setattr(scaled, "__name__", "s")
    for name, change in changes.items():
        before = run(eager, 7)
        change()
        assert not torch.equal(run(eager, 7), before), name
        for n in (7, 5):
            got, want = run(body, n), run(eager, n)
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), name


def test_a_change_of_the_file_that_a_model_is_written_in_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama as file

    module = tiny("Llama", num_hidden_layers=1)
    eager = copy.deepcopy(module)
    body = ready("compile", module, buckets=[8])
    start = replays(body)
    check(body, eager, 7, 5)
    rotate, apply = file.rotate_half, file.apply_rotary_pos_emb

    def applied(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return apply(2 * q, k, cos, sin, unsqueeze_dim)

    changes: dict[str, Callable[[], Any]] = {
        "a function": lambda: monkeypatch.setattr(file, "rotate_half", lambda x: rotate(x) / 2),
        "another": lambda: monkeypatch.setattr(file, "apply_rotary_pos_emb", applied),
        "the function back": lambda: monkeypatch.setattr(file, "rotate_half", rotate),
        "the other back": lambda: monkeypatch.setattr(file, "apply_rotary_pos_emb", apply),
    }
    for name, change in changes.items():
        before = first(run(eager, 7))
        change()
        assert not torch.equal(first(run(eager, 7)), before), name
        check(body, eager, 7, 5)
    assert replays(body) >= start + 2 + 2 * len(changes)


@watched
def test_globals_that_a_forward_does_not_read_may_change_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a script do, in which a model may be written."""
    module = Reads().eval()
    eager = copy.deepcopy(module)
    body = ready("compile", module, buckets=[8])
    check(body, eager, 7)
    monkeypatch.setattr(Variant, "holds", lambda *a: pytest.fail("asked in full without a change"))
    for i in range(4):
        monkeypatch.setitem(globals(), "CALLS", i)
        check(body, eager, 7, 5)


@pytest.mark.parametrize("where", ["a module", "an object with slots"])
def test_one_object_in_two_places_that_becomes_two_is_followed(where: str) -> None:
    module, listed = T2(layers=2, hidden=8, heads=2), [0.5, 2.0]
    for layer in module.layers:
        layer.mlp = Shares(listed, Slotted(listed))
    eager = copy.deepcopy(module.eval())
    body = ready("compile", module, buckets=[8])
    check(body, eager, 7, 5)
    before = run(eager, 7)
    for changed in (module, eager):
        reader: Any = changed.layers[1].mlp
        (reader if where == "a module" else reader.slotted).listed = [-1.0, -3.0]
    assert not torch.equal(run(eager, 7), before)
    for n in (7, 5):
        assert torch.allclose(run(body, n), run(eager, n), rtol=1e-4, atol=1e-4)


@pytest.fixture
def no_models_before() -> Iterator[None]:
    """Dynamo asks for every key of a dict of transformers that has one for each class of model that was made."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY as kinds

    before = dict(kinds)
    kinds.clear()
    yield
    kinds |= before


@watched
def test_how_much_is_asked_at_a_call_does_not_grow_with_the_layers(no_models_before: None) -> None:
    asked = []
    for layers in (2, 3):
        body = tiny("Qwen3", num_hidden_layers=layers)
        ready("compile", body, buckets=[8])
        (variant,) = _variants(body)
        assert variant.standing is not None
        asked.append(variant.standing.asked)
    assert asked[0] == asked[1] < 40


@watched
def test_a_module_that_changes_at_each_call_is_right_and_asked_in_full() -> None:
    module = T2(layers=1).eval()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    start = replays(body)
    for i in range(20):
        module.calls = i
        check(body, eager, 7)
    assert replays(body) == start + 20
    (variant,) = _variants(body)
    assert variant._pause > 8
    module.layers[0].mlp[1] = eager.layers[0].mlp[1] = nn.Tanh()
    check(body, eager, 7, 5)


@watched
def test_it_is_watched_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    module = T2(layers=1).eval()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    module.note = 1
    run(body, 7)
    monkeypatch.setattr(Variant, "holds", lambda *a: pytest.fail("asked in full without a change"))
    check(body, eager, 7, 5)
    monkeypatch.undo()
    module.layers[0].norm1.eps = eager.layers[0].norm1.eps = 3.0
    equal(run(body, 7), run(eager, 7))


def _variants(body: nn.Module) -> list[Variant]:
    compiled = compiled_body(body)
    assert compiled is not None
    return [v for vs in compiled.forms.variants.values() for v in vs]
