"""Any ladder, any slots, any batches in any order, in every dress of the static buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fullgraph_compile as fgc
from fullgraph_compile import Reason, Route
from fullgraph_compile.dispatch import Limits, decide
from fullgraph_compile.ladder import legal_buckets
from fullgraph_compile.staging import Poison
from tests.models import T2, tokens
from tests.reports.cases import DRESSES, Pair, equal, packed, pair, per_request

MOST = 48


@pytest.fixture(scope="module")
def t2() -> Pair:
    return pair(T2(), buckets=[MOST])


def capture(t2: Pair, limits: Limits) -> None:
    """Let the compiled body capture other buckets, at its next call that fits."""
    runner = t2.graph.runner
    runner.release()
    runner.limits = limits


ladders = st.sets(st.integers(1, MOST), min_size=1, max_size=4)
batches = st.lists(st.lists(st.integers(0, 24), min_size=1, max_size=10), min_size=2, max_size=5)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ladder=ladders,
    slots=st.integers(1, 12),
    context=st.integers(1, MOST),
    padding=st.sampled_from([1.0, 2.0, float("inf")]),
    batches=batches,
    order=st.lists(st.integers(0, 4), min_size=3, max_size=8),
    dresses=st.permutations(DRESSES),
)
def test_rows_equal_eagers_and_each_call_goes_where_the_decision_says(
    t2: Pair,
    ladder: set[int],
    slots: int,
    context: int,
    padding: float,
    batches: list[list[int]],
    order: list[int],
    dresses: list[Poison | None],
) -> None:
    legal = legal_buckets(sorted(ladder), context, slots)
    limits = Limits(legal, slots, context, padding, blocked=None if legal else Reason.NO_BUCKET)
    capture(t2, limits)
    for dress in dresses:
        t2.dress(dress)
        # A, B, ... and A again: what a batch leaves behind shows in the next one, in one of the two orders.
        for i in [*order, order[0]]:
            lengths = batches[i % len(batches)]
            expected = decide(sum(lengths), len(lengths), max(lengths), limits)
            before = t2.report
            ids = tokens(sum(lengths), seed=i)
            got = packed(t2.body, ids, lengths)
            equal(got, per_request(t2.eager, ids, lengths))
            replays, fallbacks = t2.report.replays - before.replays, t2.report.fallbacks - before.fallbacks
            if expected.route is Route.GRAPH:
                assert (replays, fallbacks) == ({expected.bucket: 1}, {})
                assert t2.report.padding.total() - before.padding.total() == (expected.bucket or 0) - sum(lengths)
            else:
                assert (replays, fallbacks) == ({}, {expected.reason: 1})
            with torch.inference_mode(), fgc.PrefillBatch(lengths, device="cpu") as batch:
                said = fgc.decision(t2.body, input_ids=ids[None], position_ids=batch.position_ids[None])
            assert said == expected
    assert t2.report.compiles == 1


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=batches, b=batches, dress=st.sampled_from(DRESSES))
def test_a_replay_gives_the_same_bits_whatever_ran_before(
    t2: Pair, a: list[list[int]], b: list[list[int]], dress: Poison | None
) -> None:
    if t2.graph.runner.limits.ladder != (8, 24, MOST):
        capture(t2, replace(t2.graph.runner.limits, ladder=(8, 24, MOST), slots=10, context_length=MOST, blocked=None))
    t2.dress(dress)
    once = [packed(t2.body, tokens(sum(lengths)), lengths) for lengths in a]
    for lengths in reversed(b):
        packed(t2.body, tokens(sum(lengths), seed=2), lengths)
    for lengths, rows in zip(reversed(a), reversed(once), strict=True):
        assert torch.equal(packed(t2.body, tokens(sum(lengths)), lengths), rows)
