"""Which way a bucket runs, from times that are given."""

from __future__ import annotations

from itertools import pairwise
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
