"""The measured ladder: a pure function from timings to token buckets.

Equal timings give equal ladders.  Nothing here runs a model.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fullgraph_compile.ladder import default_ladder
from fullgraph_compile.ladder_costs import Costs, Timing


@dataclass(frozen=True)
class Forecast:
    """Device memory that captured graphs will take, in bytes, before any is captured.

    Attributes:
        fixed: what does not depend on the ladder.
        row: for each row of the largest bucket: intermediate values, static inputs and outputs.
        graph: for each graph.
    """

    fixed: float = 0.0
    row: float = 0.0
    graph: float = 0.0

    def bytes(self, count: int, largest: int) -> int:
        """What ``count`` graphs take, the largest of ``largest`` tokens."""
        return math.ceil(self.fixed + self.row * largest + self.graph * count) if count else 0

    def cut(self, ladder: Sequence[int], budget: int | None, count: int | None = None) -> tuple[int, ...]:
        """The ladder without the largest buckets that do not fit ``budget`` bytes: they cost most and gain least.

        Args:
            count: how many of them must fit at the same time; None = all.
        """
        kept = tuple(sorted(ladder))
        while budget is not None and kept and self.bytes(min(len(kept), count or len(kept)), kept[-1]) > budget:
            kept = kept[:-1]
        return kept


@dataclass(frozen=True)
class MeasuredLadder:
    """A ladder that was chosen by timings.

    Attributes:
        buckets: token buckets, ascending; empty = no graph pays, or none fits the budget.
        least: for each bucket the fewest tokens that it serves; with fewer the compiled route is faster.
        cost: mean time of a call over the least that any candidate gives it; 1.0 = no call could be faster.
        default_buckets, default_cost: the same of the default ladder.
        crossover: the largest bucket that a graph pays for; above it the compiled route is taken.  None = no graph.
        forecast: bytes of device memory that the graphs were forecast to take.
        wanted: buckets that would have been chosen without a budget.
        timings: what was measured.
        untimed: candidates that were not: one graph of them alone is over the budget, or cannot be captured.
        beyond: of the lengths to expect those above the largest timing, with their share of all calls.  No bucket
            serves them, and they are in neither cost.
        by_lengths: whether the costs are those of the other lengths; else every size of call counts alike on a log
            scale.
    """

    buckets: tuple[int, ...]
    least: tuple[int, ...]
    cost: float
    default_buckets: tuple[int, ...]
    default_cost: float
    crossover: int | None
    forecast: int
    wanted: tuple[int, ...]
    timings: tuple[Timing, ...]
    untimed: tuple[int, ...] = ()
    beyond: tuple[tuple[int, float], ...] = ()
    by_lengths: bool = False

    @property
    def cut(self) -> bool:
        """Whether the budget left out buckets that pay."""
        return self.buckets != self.wanted

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=110, color_system=None)
        table = Table("size", "replay, ms", "compiled, ms", "bucket", "serves")
        for column in table.columns:
            column.justify = "right"
        serves = dict(zip(self.buckets, self.least, strict=True))
        low = 0
        for t in self.timings:
            least = serves.get(t.tokens)
            kept = "" if least is None else f"{max(low + 1, least)} to {t.tokens}"
            table.add_row(
                str(t.tokens), f"{t.replay * 1e3:.3f}", f"{t.compiled * 1e3:.3f}", "yes" if kept else "", kept
            )
            low = t.tokens if kept else low
        console.print(table)
        console.print(self.summary(), highlight=False)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def summary(self) -> str:
        """The choice in words, against the default ladder."""
        # Plus 0.0, as a cost that is rounded to no difference from below would be -0.0.
        ours, default = (f"{round(cost - 1, 3) + 0.0:+.1%}" for cost in (self.cost, self.default_cost))
        lines = [
            f"measured ladder: {len(self.buckets)} buckets {list(self.buckets)}, forecast {self.forecast >> 20} MiB",
            f"expected time over the best of all {len(self.timings)} sizes: {ours}; by the default ladder of "
            f"{len(self.default_buckets)}: {default}",
            *self._left_out(),
        ]
        if self.cut:
            lines.append(f"memory_budget cut it: without one it would be {list(self.wanted)}")
        if self.crossover is None:
            lines.append("no graph pays" if not self.wanted else "no graph fits")
        elif self.crossover < self.timings[-1].tokens:
            lines.append(f"above {self.crossover} tokens the compiled route is taken")
        return "\n".join(lines)

    def _left_out(self) -> list[str]:
        """What the costs do not count, in words."""
        lines = []
        timed = self.timings[-1].tokens
        most = max((timed, *self.untimed))
        for calls, why in (
            ([c for c in self.beyond if c[0] <= most], f"{timed} tokens, the largest size that was timed"),
            (
                [c for c in self.beyond if c[0] > most],
                f"{most} tokens, the largest bucket that max_tokens and request_slots allow",
            ),
        ):
            if calls:
                low, high = calls[0][0], calls[-1][0]
                which = f"{low}" if low == high else f"{low} to {high}"
                share = sum(share for _, share in calls)
                lines.append(f"lengths of {which} tokens, {share:.1%} of the calls, are above {why}")
        if lines:
            lines.append("no bucket serves these: they take the compiled route, and that time leaves them out")
        if self.beyond and not self.by_lengths:
            lines.append("there are no others, so that time is of every size of call, short ones as often as long ones")
        if self.untimed:
            sizes = ", ".join(map(str, self.untimed))
            lines.append(f"not timed, as each alone is over memory_budget or cannot be captured: {sizes}")
        return lines


# A bucket that gains less than this in the mean is not worth its memory and its capture.
TOLERANCE = 0.005


def choose_ladder(
    timings: Sequence[Timing],
    lengths: Sequence[tuple[int, float]] = (),
    *,
    max_padding: float = math.inf,
    forecast: Forecast | None = None,
    budget: int | None = None,
    tolerance: float = TOLERANCE,
    untimed: Sequence[int] = (),
) -> MeasuredLadder:
    """The fewest buckets whose expected time is within ``tolerance`` of the least that fits the budget.

    Args:
        timings: of the candidates.
        lengths: (token count, weight) of the calls to expect; see ``Costs``.
        max_padding: as the option.
        forecast: what graphs will take.
        budget: bytes that they may take; None = no limit.
        tolerance: as a share of the expected time.
        untimed: candidates that there are no timings of, to be named.

    Raises:
        ValueError: the timings are not ones.
    """
    costs = Costs(timings, lengths, max_padding)
    forecast = forecast or Forecast()
    table = _table(costs)
    chosen = _choose(table, costs, forecast, budget, tolerance)
    wanted = chosen if budget is None else _choose(table, costs, forecast, None, tolerance)
    default = default_ladder(costs.most)
    index = {b: i for i, b in enumerate(costs.sizes)}
    return MeasuredLadder(
        buckets=chosen,
        least=tuple(costs.least[index[b]] for b in chosen),
        cost=costs.of(chosen),
        default_buckets=default,
        default_cost=costs.of(default, measured=False),
        crossover=chosen[-1] if chosen else None,
        forecast=forecast.bytes(len(chosen), chosen[-1]) if chosen else 0,
        wanted=wanted,
        timings=tuple(sorted(timings, key=lambda t: t.tokens)),
        untimed=tuple(sorted(untimed)),
        beyond=costs.beyond,
        by_lengths=costs.by_lengths,
    )


# (buckets in the ladder, index of its largest) -> (share of time, index of the one below the largest)
_Table = dict[tuple[int, int], tuple[float, int]]


def _table(costs: Costs) -> _Table:
    """The best ladder of every number of buckets and every largest bucket, by dynamic programming."""
    n = len(costs.sizes)
    sums = [np.concatenate([[0.0], np.cumsum(_share_up_to(costs, i))]) for i in range(n)]
    without = np.concatenate([[0.0], np.cumsum(costs.share(costs.compiled))])

    def rest(i: int) -> float:
        return float(without[-1] - without[costs.sizes[i]])

    table: _Table = {(0, -1): (float(without[-1]), -1)}
    up_to: dict[tuple[int, int], float] = {}  # share of the counts up to the largest bucket only
    for i in range(n):
        up_to[1, i] = float(sums[i][-1])
        table[1, i] = (up_to[1, i] + rest(i), -1)
    for count in range(2, n + 1):
        for i in range(count - 1, n):
            share, below = min(
                (up_to[count - 1, j] + float(sums[i][-1] - sums[i][costs.sizes[j]]), j) for j in range(count - 2, i)
            )
            up_to[count, i] = share
            table[count, i] = (share + rest(i), below)
    return table


def _share_up_to(costs: Costs, i: int) -> np.ndarray:
    size = costs.sizes[i]
    return costs.weights[:size] * costs.with_bucket(i) / costs.best[:size]


def _choose(table: _Table, costs: Costs, forecast: Forecast, budget: int | None, tolerance: float) -> tuple[int, ...]:
    def fits(count: int, largest: int) -> bool:
        size = costs.sizes[largest] if count else 0
        return budget is None or forecast.bytes(count, size) <= budget

    legal = {key: value for key, value in table.items() if fits(*key)}
    enough = min(share for share, _ in legal.values()) * (1 + tolerance)
    count, largest = min(
        (key for key, (share, _) in legal.items() if share <= enough), key=lambda k: (k[0], legal[k][0], k[1])
    )
    ladder = []
    while count:
        ladder.append(costs.sizes[largest])
        count, largest = count - 1, table[count, largest][1]
    return tuple(reversed(ladder))
