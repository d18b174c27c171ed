"""What a forward writes to things that were there before the call: it is written at each call, also past Dynamo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import T2, tiny, tokens
from tests.runtime.bodies import check_replayed, compiled, equal, ready, replays, run, runners


class Place:
    def __init__(self) -> None:
        self.last: Any = None
        self.active = False


LAST: dict[str, Any] = {"last": None}
NEWEST: Tensor | None = None


def _in_a_dict(module: Any, hidden: Tensor) -> None:
    module.store["last"] = hidden


def _in_a_list(module: Any, hidden: Tensor) -> None:
    module.stores[0] = hidden


def _in_turn(module: Any, hidden: Tensor) -> None:
    module.stores.append(hidden)
    module.stores.pop(0)


def _in_an_object(module: Any, hidden: Tensor) -> None:
    module.place_of_its_own.last = hidden


def _in_a_global_dict(module: Any, hidden: Tensor) -> None:
    LAST["last"] = hidden


def _in_a_global(module: Any, hidden: Tensor) -> None:
    global NEWEST
    NEWEST = hidden


def _a_size(module: Any, hidden: Tensor) -> None:
    module.store["last"] = hidden.shape[1]


class Writing(T2):
    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__(layers=1)
        self.write = write
        self.store: dict[str, Any] = {"last": None}
        self.stores: list[Any] = [None]
        self.place_of_its_own = Place()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = super().forward(input_ids, position_ids)
        self.write(self, hidden)
        return hidden * 2

    def written(self) -> Any:
        found = [self.store["last"], self.stores[0], self.place_of_its_own.last, LAST["last"], NEWEST]
        return next(x for x in found if x is not None)


@pytest.mark.parametrize(
    "write", [_in_a_dict, _in_a_list, _in_turn, _in_an_object, _in_a_global_dict, _in_a_global, _a_size]
)
def test_what_a_call_writes_somewhere_is_of_that_call(write: Callable[[Any, Tensor], None]) -> None:
    global NEWEST
    LAST["last"] = None
    NEWEST = None
    module = Writing(write).eval()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, buckets=[8])
    for n in (5, 6, 7, 6):
        equal(run(body, n, seed=n), want := run(eager, n, seed=n))
        LAST["last"] = None
        NEWEST = None
        equal(run(body, n, seed=n), want)
        if write is _a_size:
            assert module.written() == n
        else:
            equal(module.written() * 2, want)
    assert replays(body) == 8


class Restoring(T2):
    """Sets what it shares with others for its own time, as transformers does to collect outputs."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.shared = Place()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.shared.active = True
        hidden = super().forward(input_ids, position_ids)
        self.shared.active = False
        return hidden


def test_what_a_call_puts_back_does_not_send_calls_through_dynamo() -> None:
    for module in (Restoring().eval(), tiny("Llama", num_hidden_layers=1)):
        eager = copy.deepcopy(module)
        body = ready("compile", module, buckets=[8])
        check_replayed(body, eager, 7, 3, 7)
        assert runners(body)
        assert all(v.direct for forms in body.forward.forms.variants.values() for v in forms)


def test_a_dict_that_is_emptied_between_calls_is_written_by_each() -> None:
    module = Writing(_in_a_global_dict).eval()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, buckets=[8])
    for n in (5, 6, 7, 6, 5):
        want = run(eager, n, seed=n)
        LAST.clear()
        equal(run(body, n, seed=n), want)
        equal(LAST["last"] * 2, want)


class Naming(T2):
    """Notes what kind of call it was last: with a scale, or without."""

    def __init__(self, shared: bool) -> None:
        super().__init__(layers=1)
        self.shared = Place()
        self.last_kind = "plain"
        self.in_shared = shared

    def forward(self, input_ids: Tensor, position_ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = super().forward(input_ids, position_ids)
        kind = "plain" if scale is None else "scaled"
        if self.in_shared:
            self.shared.last = kind
        else:
            self.last_kind = kind
        return hidden if scale is None else hidden * scale

    @property
    def kind(self) -> str:
        return self.shared.last if self.in_shared else self.last_kind


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("first", ["plain", "scaled"])
def test_what_other_forms_of_the_call_write_does_not_stay(shared: bool, first: str) -> None:
    module = Naming(shared).eval()
    module.shared.last = module.last_kind = first  # what the first call writes is there already
    body = compiled("compile", module, buckets=[8])
    scale = torch.full((1, 7, 1), 2.0)
    kinds = [first, *["plain", "scaled"] * 3, "plain", "plain"]
    for kind in kinds:
        given = {} if kind == "plain" else {"scale": scale}
        with torch.no_grad():
            body(input_ids=tokens(7)[None], position_ids=torch.arange(7)[None], **given)
        assert module.kind == kind, kinds
    # A caller's own value is written over, as by the module itself.
    module.shared.last = module.last_kind = "none"
    run(body, 7)
    assert module.kind == "plain"
