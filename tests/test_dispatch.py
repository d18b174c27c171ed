"""The decision is a pure function: the nearest bucket that fits, or a named reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullgraph_compile.dispatch import Decision, Limits, Reason, Route, decide

LIMITS = Limits(ladder=(4, 8, 16, 32, 128), slots=4, context_length=64)


@pytest.mark.parametrize(
    ("tokens", "requests", "longest", "decision"),
    [
        (1, 1, 1, Decision(Route.GRAPH, 4)),
        (4, 1, 4, Decision(Route.GRAPH, 4)),
        (5, 4, 3, Decision(Route.GRAPH, 8)),
        (32, 2, 16, Decision(Route.GRAPH, 32)),
        (5, 5, 1, Decision(Route.COMPILED, None, Reason.OVER_SLOTS)),
        (129, 4, 64, Decision(Route.COMPILED, None, Reason.OVER_LADDER)),
        (65, 1, 65, Decision(Route.COMPILED, None, Reason.OVER_CONTEXT)),
        (0, 1, 0, Decision(Route.COMPILED, None, Reason.EMPTY)),
    ],
)
def test_each_limit_has_its_reason(tokens: int, requests: int, longest: int, decision: Decision) -> None:
    assert decide(tokens, requests, longest, LIMITS) == decision


def test_b60_padding_above_the_limit_is_refused_and_the_limit_can_be_turned_off() -> None:
    assert decide(40, 1, 40, LIMITS) == Decision(Route.COMPILED, None, Reason.PADDING)
    assert decide(64, 1, 64, LIMITS) == Decision(Route.GRAPH, 128)
    free = Limits(LIMITS.ladder, 4, 64, max_padding=float("inf"))
    assert decide(40, 1, 40, free) == Decision(Route.GRAPH, 128)


def test_padding_up_to_64_tokens_is_free() -> None:
    assert decide(1, 1, 1, Limits((64,), 4, 64)) == Decision(Route.GRAPH, 64)


def test_b56_just_above_the_largest_bucket_is_not_a_graph() -> None:
    limits = Limits((32,), 4, 64)
    assert [decide(n, 1, n, limits).route for n in (33, 32, 33)] == [Route.COMPILED, Route.GRAPH, Route.COMPILED]


def test_a_bucket_that_was_turned_off_is_not_replaced_by_a_larger_one() -> None:
    limits = Limits((8, 16), 4, 64, off=((8, Reason.CAPTURE_FAILED),))
    assert decide(5, 1, 5, limits) == Decision(Route.COMPILED, 8, Reason.CAPTURE_FAILED)
    assert decide(9, 1, 9, limits) == Decision(Route.GRAPH, 16)


def test_a_bucket_serves_no_fewer_tokens_than_were_measured_to_pay() -> None:
    limits = Limits((8, 64), 4, 64, least=((8, 1), (64, 40)), above=(96, Reason.CROSSOVER))
    assert [decide(n, 1, n, limits).bucket for n in (1, 8, 40, 64)] == [8, 8, 64, 64]
    assert decide(39, 1, 39, limits) == Decision(Route.COMPILED, None, Reason.CROSSOVER)
    assert decide(96, 1, 64, limits) == Decision(Route.COMPILED, None, Reason.CROSSOVER)
    assert decide(97, 1, 64, limits) == Decision(Route.COMPILED, None, Reason.OVER_LADDER)
    assert decide(5, 1, 5, Limits((), 4, 64, above=(96, Reason.MEMORY))).reason is Reason.MEMORY


def test_every_reason_is_text_a_person_can_read() -> None:
    texts = [r.value for r in Reason]
    assert len(set(texts)) == len(texts)
    assert all(" " in t for t in texts)


@given(
    ladder=st.sets(st.integers(1, 300), min_size=1, max_size=8),
    slots=st.integers(1, 40),
    context=st.integers(1, 300),
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=50),
)
def test_a_graph_is_chosen_exactly_if_all_limits_hold(
    ladder: set[int], slots: int, context: int, lengths: list[int]
) -> None:
    limits = Limits(tuple(sorted(ladder)), slots, context)
    tokens, longest = sum(lengths), max(lengths)
    decision = decide(tokens, len(lengths), longest, limits)
    fitting = [b for b in ladder if b >= tokens]
    fits = bool(fitting) and tokens > 0 and longest <= context
    fits = fits and len(lengths) <= min(slots, min(fitting, default=0))
    fits = fits and (min(fitting) <= 64 or min(fitting) <= 2 * tokens)
    assert (decision.route is Route.GRAPH) == fits
    if fits:
        assert decision.bucket == min(fitting)
        assert decision.reason is None
    else:
        assert decision.reason is not None
