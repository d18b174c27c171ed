"""Which way a bucket runs, from times that are given."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from fullgraph_compile.integrations.sglang import routes
from fullgraph_compile.integrations.sglang.routes import BucketTimes, spread


@pytest.mark.parametrize(
    ("compiled", "sglang", "eager", "way"),
    [
        (1.0, 2.0, 3.0, "compiled"),
        (1.02, 1.0, 1.0, "compiled"),
        (1.021, 1.0, 1.0, "SGLang's"),
        (1.03, 1.02, 1.0, "eager"),
        (3.0, 2.0, 2.5, "SGLang's"),
    ],
)
def test_the_compiled_graph_is_left_only_where_it_is_slower_by_more_than_the_margin(
    compiled: float, sglang: float, eager: float, way: str
) -> None:
    times = BucketTimes(64, {"eager": eager, "SGLang's": sglang, "compiled": compiled})
    assert times.way == way
    assert str(times) == f"bucket 64: {way} (compiled {compiled:.3f}, SGLang's {sglang:.3f}, eager {eager:.3f} ms)"


def test_a_long_ladder_is_timed_at_some_buckets_first_and_last_among_them() -> None:
    small = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32)]
    ladder = [*small, *range(576, 1025, 64), *range(1280, 4097, 256)]
    some = spread(ladder)
    assert len(some) <= routes.MOST_TIMED and (some[0], some[-1]) == (4, 4096) and set(some) <= set(ladder)
    assert max(b / a for a, b in pairwise(some)) < 2.5
    assert spread([16, 32, 64]) == [16, 32, 64]


def test_long_calls_are_timed_less_often_and_inputs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, Any]] = []

    def timed(way: str, bucket: int, call: Any, batch: Any, synchronize: Any) -> float:
        called.append((way, batch))
        return {"compiled": 80.0, "SGLang's": 70.0, "eager": 60.0}[way]

    monkeypatch.setattr(routes, "timed", timed)
    ways = {way: lambda batch: None for way in routes.WAYS}
    assert routes._times(4096, ways, ["a", "b"], lambda: None) == {"compiled": 80.0, "SGLang's": 70.0, "eager": 60.0}
    assert [batch for way, batch in called if way == "eager"] == ["a", "b", "a"]


@pytest.mark.parametrize(("host", "reading", "left"), [(1.0, 1.2, set()), (1.02, 1.0, set()), (1.05, 1.0, {64})])
def test_plans_are_left_to_sglang_where_they_are_measured_to_be_faster(
    host: float, reading: float, left: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, set[int]]] = []

    def timed(way: str, bucket: int, call: Any, batch: Any, synchronize: Any) -> float:
        call(batch)
        seen.append((way, seen_left[-1]))
        return {"the host": host, "SGLang": reading}[way]

    monkeypatch.setattr(routes, "timed", timed)
    plans: Any = SimpleNamespace(left={16})
    seen_left: list[set[int]] = []
    call = lambda batch: seen_left.append(set(plans.left))  # noqa: E731
    times = routes._choose_plan(64, call, ["a"], plans, lambda: None)
    assert plans.left == {16} | left and times == {"the host": host, "SGLang": reading}
    assert ("the host", {16}) in seen and ("SGLang", {16, 64}) in seen
    text = str(BucketTimes(64, {"compiled": 1.0}, times))
    assert f"; planned by the host {host:.3f}, SGLang {reading:.3f})" in text
    assert routes._choose_plan(64, call, ["a"], None, lambda: None) == {}
