"""Methods that are replaced or rewritten after the first call, wherever their class stands, are followed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullgraph_compile.variant import Variant
from fullgraph_compile.watching import WORKS
from tests.models import T2
from tests.runtime.bodies import check, ready, run


class Mixin:
    """Behind ``nn.Module`` among the bases, as those of transformers' models are."""

    def scaled(self, x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    @classmethod
    def shifted(cls, x: Tensor) -> Tensor:
        return x + 1


class Mixed(T2, Mixin):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.shifted(self.scaled(super().forward(input_ids, position_ids)))


def less(self: Any, x: Tensor, by: float = 0.5) -> Tensor:
    return x * by - 1


def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    out = self.forward(*args, **kwargs)
    return out * 1.5 if isinstance(self, Mixed) else out


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a method of a mixin": lambda patch: patch.setattr(Mixin, "scaled", less),
    "a class method": lambda patch: patch.setattr(Mixin, "shifted", classmethod(lambda cls, x: x - 1)),
    "the code of a method": lambda patch: patch.setattr(Mixin.scaled, "__code__", less.__code__),
    "the defaults of a method": lambda patch: patch.setattr(Mixin.scaled, "__defaults__", (3.0,)),
    "how modules are called": lambda patch: patch.setattr(nn.Module, "__call__", called),
}


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in CHANGES.items()])
def test_a_method_that_is_changed_is_followed_and_so_is_the_old_one(
    change: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Mixed().eval()
    eager = copy.deepcopy(module)
    body = ready("compile", module, buckets=[8])
    check(body, eager, 7, 5)
    with monkeypatch.context() as patch:
        before = run(eager, 7)
        change(patch)
        assert not torch.allclose(run(eager, 7), before)
        check(body, eager, 7, 5)
    check(body, eager, 7, 5)


@pytest.mark.skipif(not WORKS, reason="all guards are asked at each call on this Python")
def test_methods_that_stay_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    body = ready("compile", Mixed().eval(), buckets=[8], strict=True)
    run(body, 7)
    monkeypatch.setattr(Variant, "holds", lambda *a: pytest.fail("asked in full without a change"))
    run(body, 7), run(body, 5)
