"""The measured ladder is a pure function of timings: the fewest buckets that cost next to nothing, within a budget."""

from __future__ import annotations

import itertools
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullgraph_compile.ladder import default_ladder
from fullgraph_compile.ladder_costs import Costs, Timing, candidate_sizes
from fullgraph_compile.measured_ladder import Forecast, choose_ladder


def steps_at(*edges: tuple[int, float]):
    """A cost that is flat up to each edge."""
    return lambda n: next(cost for edge, cost in edges if n <= edge)


STEPS = steps_at((64, 5.0), (128, 6.0), (256, 9.0), (512, 15.0))


def timings(replay, compiled, sizes=(8, 16, 32, 64, 96, 128, 192, 256, 384, 512)) -> list[Timing]:
    return [
        Timing(n, replay(n), compiled(n), compiled(below + 1)) for below, n in zip([0, *sizes], sizes, strict=False)
    ]


def test_a_bucket_is_kept_where_the_cost_steps_and_nowhere_else() -> None:
    chosen = choose_ladder(timings(STEPS, lambda n: 100.0))
    assert chosen.buckets == (64, 128, 256, 512)
    assert chosen.least == (1, 1, 1, 1)
    assert chosen.cost == pytest.approx(1.0)
    assert chosen.crossover == 512 and not chosen.cut


def test_the_compiled_route_is_taken_where_it_is_faster_and_no_bucket_is_kept_above() -> None:
    chosen = choose_ladder(timings(STEPS, lambda n: 8.0 + n / 100))  # the lines cross at 100 and, for good, at 129
    assert chosen.crossover == 256 or chosen.crossover == 128
    for bucket, least in zip(chosen.buckets, chosen.least, strict=True):
        assert all(STEPS(bucket) <= 8.0 + n / 100 + 1e-9 for n in range(least, bucket + 1))
    none = choose_ladder(timings(STEPS, lambda n: 1.0))
    assert none.buckets == () and none.crossover is None and "no graph pays" in str(none)


def test_a_bucket_serves_only_counts_for_which_its_replay_is_no_slower() -> None:
    chosen = choose_ladder(timings(lambda n: n / 10, lambda n: n / 8, sizes=(80, 160, 320)), tolerance=0)
    assert chosen.buckets == (80, 160, 320)
    assert chosen.least == (64, 128, 256)


def test_a_histogram_puts_buckets_where_the_calls_are() -> None:
    linear = timings(lambda n: float(n), lambda n: 1e6)
    assert choose_ladder(linear, [(30, 5.0), (250, 1.0)]).buckets == (32, 256)
    assert choose_ladder(linear, [(30, 5.0), (9000, 1.0)]).buckets == (32,)
    assert len(choose_ladder(linear).buckets) > 5


def test_popular_lengths_are_candidates() -> None:
    assert 704 in candidate_sizes(2048, [(700, 3.0)])
    assert 2048 in candidate_sizes(2048, [(5000, 3.0)]) and max(candidate_sizes(2048, [(5000, 3.0)])) == 2048
    assert set(default_ladder(2048)) <= set(candidate_sizes(2048))
    assert len(candidate_sizes(8192)) < 50
    longer = [(5000 + i, 9.0) for i in range(20)]
    assert 704 in candidate_sizes(2048, [*longer, (700, 3.0)])


def test_at_the_budget_the_ladder_is_cut_and_says_so() -> None:
    forecast = Forecast(fixed=100, row=1, graph=10)
    timed = timings(STEPS, lambda n: 100.0)
    free = choose_ladder(timed, forecast=forecast)
    assert free.forecast == 100 + 512 + 4 * 10
    cut = choose_ladder(timed, forecast=forecast, budget=400)
    assert cut.buckets == (64, 128, 256)
    assert cut.cut and cut.wanted == free.buckets
    assert cut.forecast <= 400
    assert "memory_budget cut it" in cut.summary()
    nothing = choose_ladder(timed, forecast=forecast, budget=50)
    assert nothing.buckets == () and "no graph fits" in nothing.summary()


def test_max_padding_holds_above_64_tokens() -> None:
    chosen = choose_ladder(timings(lambda n: 5.0, lambda n: 100.0), max_padding=2.0)
    assert {8, 16, 32} & set(chosen.buckets) == set()
    for bucket, least in zip(chosen.buckets, chosen.least, strict=True):
        assert bucket <= 64 or least * 2 >= bucket


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [Timing(8, 1.0, 1.0, 1.0), Timing(8, 1.0, 1.0, 1.0)],
        [Timing(0, 1.0, 1.0, 1.0)],
        [Timing(8, 0.0, 1.0, 1.0)],
        [Timing(8, math.nan, 1.0, 1.0)],
    ],
)
def test_timings_that_are_none_are_refused(bad: list[Timing]) -> None:
    with pytest.raises(ValueError, match="timing"):
        choose_ladder(bad)


seconds = st.integers(1, 50).map(lambda n: n / 10)
measured = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).flatmap(
    lambda sizes: st.tuples(*[st.builds(Timing, st.just(n), seconds, seconds, seconds) for n in sizes])
)
histograms = st.dictionaries(st.integers(1, 60), st.integers(1, 9), max_size=4).map(lambda d: sorted(d.items()))
forecasts = st.builds(Forecast, st.integers(0, 50), st.integers(0, 5), st.integers(0, 20))
budgets = st.none() | st.integers(0, 300)


@settings(max_examples=150, deadline=None)
@given(measured, histograms, forecasts, budgets, st.sampled_from([1.0, 1.5, 2.0, math.inf]))
def test_no_ladder_that_fits_is_better_than_the_chosen_by_more_than_the_tolerance(
    timed, lengths, forecast, budget, max_padding
) -> None:
    costs = Costs(timed, lengths, max_padding)
    chosen = choose_ladder(timed, lengths, max_padding=max_padding, forecast=forecast, budget=budget, tolerance=0.01)

    def fits(ladder: tuple[int, ...]) -> bool:
        return budget is None or not ladder or forecast.bytes(len(ladder), ladder[-1]) <= budget

    def cost(ladder: tuple[int, ...]) -> float:
        total = 0.0
        for n in range(1, costs.most + 1):
            took = costs.compiled[n - 1]
            bucket = next((b for b in ladder if b >= n), None)
            if bucket is not None and n >= costs.least[costs.sizes.index(bucket)]:
                took = costs.replay[costs.sizes.index(bucket)]
            total += costs.weights[n - 1] * took / costs.best[n - 1]
        return total

    every = [c for k in range(len(costs.sizes) + 1) for c in itertools.combinations(costs.sizes, k) if fits(c)]
    least = min(map(cost, every))
    assert fits(chosen.buckets)
    assert cost(chosen.buckets) <= least * 1.01 + 1e-9
    fewer = [c for c in every if len(c) < len(chosen.buckets)]
    assert all(cost(c) > least * 1.01 - 1e-9 for c in fewer)


def expected_cost(timed, lengths, max_padding: float, buckets: tuple[int, ...]) -> float:
    """Mean time over the best, call by call, from nothing but what the docs say."""
    timed = sorted(timed, key=lambda t: t.tokens)

    def compiled(n: int) -> float:
        below, t = next((b, t) for b, t in zip([0, *(t.tokens for t in timed)], timed, strict=False) if n <= t.tokens)
        steps = t.tokens - below - 1
        return t.compiled if not steps else t.compiled_low + (t.compiled - t.compiled_low) * (n - below - 1) / steps

    def serves(t: Timing, n: int) -> bool:
        padded = t.tokens > 64 and t.tokens > max_padding * n
        return n <= t.tokens and not padded and all(compiled(m) >= t.replay for m in range(n, t.tokens + 1))

    def took(n: int) -> float:
        held = [t for t in timed if t.tokens in buckets and t.tokens >= n]
        return held[0].replay if held and serves(held[0], n) else compiled(n)

    most = timed[-1].tokens
    calls = [(n, w) for n, w in lengths if n <= most] or [(n, 1 / n) for n in range(1, most + 1)]
    best = {n: min([compiled(n), *(t.replay for t in timed if serves(t, n))]) for n, _ in calls}
    return sum(w * took(n) / best[n] for n, w in calls) / sum(w for _, w in calls)


# No line between two of these meets a replay at a whole count, where rounding would tell which is faster.
apart = seconds.map(lambda s: s + 0.0317)
wide = st.lists(st.integers(1, 200), min_size=1, max_size=5, unique=True).flatmap(
    lambda sizes: st.tuples(*[st.builds(Timing, st.just(n), seconds, apart, apart) for n in sizes])
)
long = st.dictionaries(st.integers(1, 250), st.integers(1, 9), max_size=4).map(lambda d: sorted(d.items()))


@settings(max_examples=100, deadline=None)
@given(wide, long, forecasts, budgets, st.sampled_from([1.0, 1.5, 2.0, math.inf]))
def test_the_cost_is_the_mean_over_the_calls_that_a_timed_size_holds(
    timed, lengths, forecast, budget, max_padding
) -> None:
    chosen = choose_ladder(timed, lengths, max_padding=max_padding, forecast=forecast, budget=budget)
    assert chosen.cost == pytest.approx(expected_cost(timed, lengths, max_padding, chosen.buckets), rel=1e-9)
    assert chosen.cost >= 1 - 1e-9
    most, calls = max(t.tokens for t in timed), sum(w for _, w in lengths)
    assert dict(chosen.beyond) == pytest.approx({n: w / calls for n, w in lengths if n > most})


def test_no_padding_is_counted_as_a_gain_that_max_padding_forbids() -> None:
    flat = [Timing(n, 4.9e-3, 12e-3, 12e-3) for n in (8, 64, 512)]
    chosen = choose_ladder(flat, max_padding=2.0)
    assert chosen.least == (1, 256) and chosen.cost == pytest.approx(1.0)
    assert Costs(flat, [(100, 1.0)], 2.0).of((512,), measured=False) == pytest.approx(1.0)
    assert Costs(flat, [(300, 1.0)], 2.0).of((), measured=False) == pytest.approx(12 / 4.9)


def test_a_default_ladder_that_is_better_than_all_candidates_is_said_to_be() -> None:
    # Of the default ladder 12 is no candidate; it is taken to lie between those that were timed.
    steep = [Timing(8, 1.0, 9.0, 9.0), Timing(24, 3.0, 9.0, 9.0)]
    assert choose_ladder(steep, [(12, 1.0)]).default_cost == pytest.approx(2 / 3)
    assert "by the default ladder of 3: -33.3%" in choose_ladder(steep, [(12, 1.0)]).summary()


def test_calls_that_no_bucket_serves_are_named_with_their_share() -> None:
    one = [Timing(8, 1.0, 2.0, 2.0)]
    told = choose_ladder(one, [(3, 2.0), (20, 1.0), (5000, 0.5), (6000, 0.5)], untimed=[24, 16]).summary()
    assert "lengths of 20 tokens, 25.0% of the calls, are above 8 tokens, the largest size that was timed" in told
    assert "lengths of 5000 to 6000 tokens, 25.0% of the calls, are above 24 tokens, the largest bucket" in told
    assert "not timed, as each alone is over memory_budget or cannot be captured: 16, 24" in told
    assert "they take the compiled route, and that time leaves them out" in told and "no others" not in told
    none = choose_ladder(one, [(5000, 1.0)])
    assert "100.0% of the calls" in none.summary() and "that time is of every size of call" in none.summary()
    assert none.buckets == choose_ladder(one).buckets and not none.by_lengths
    assert "calls" not in choose_ladder(one, [(3, 2.0)]).summary()


def test_weights_of_any_magnitude_are_shares() -> None:
    linear = timings(float, lambda n: 1e6)
    want = choose_ladder(linear, [(30, 1.0), (250, 1.0), (9000, 2.0)])
    assert want.cost == 1.0 and want.beyond == ((9000, 0.5),)
    for least in (1e-300, 5e307):
        assert choose_ladder(linear, [(30, least), (250, least), (9000, 2 * least)]) == want


@settings(max_examples=50, deadline=None)
@given(measured, histograms, st.randoms())
def test_equal_timings_give_equal_ladders_in_whatever_order(timed, lengths, order: random.Random) -> None:
    shuffled = list(timed)
    order.shuffle(shuffled)
    assert choose_ladder(timed, lengths) == choose_ladder(shuffled, lengths)


@settings(max_examples=50, deadline=None)
@given(measured, histograms)
def test_no_call_is_slower_than_by_the_compiled_route(timed, lengths) -> None:
    costs = Costs(timed, lengths)
    for i, size in enumerate(costs.sizes):
        assert np.all(costs.with_bucket(i) <= costs.compiled[:size] + 1e-12)


def test_the_table_is_json_and_text() -> None:
    chosen = choose_ladder(timings(STEPS, lambda n: 100.0))
    assert json.loads(json.dumps(chosen.as_dict()))["buckets"] == [64, 128, 256, 512]
    assert "65 to 128" in str(chosen)
