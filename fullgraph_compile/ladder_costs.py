"""What every token count costs by every candidate bucket, from timings of the candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fullgraph_compile.ladder import default_ladder

# Sizes between the default buckets that may pay, as kernels' tiles end there, and the largest steps above 2,048.
_BETWEEN = (24, 48, 80, 112, 160, 224, 320, 448)
_FINE_UP_TO, _COARSE = 2048, 512
_POPULAR = 8


@dataclass(frozen=True)
class Timing:
    """What calls of about one size cost, in seconds a call.

    Attributes:
        tokens: the candidate bucket.
        replay: a call that replays its graph, staging included.
        compiled: a call of exactly ``tokens`` by the compiled pieces without a graph.
        compiled_low: such a call of one token more than the next smaller candidate, or of one token.
    """

    tokens: int
    replay: float
    compiled: float
    compiled_low: float


def candidate_sizes(max_tokens: int, lengths: Sequence[tuple[int, float]] = ()) -> tuple[int, ...]:
    """Sizes that are worth timing: those of the default ladder, some between, and the most frequent lengths."""
    popular = sorted((pair for pair in lengths if pair[0] <= max_tokens), key=lambda pair: (-pair[1], pair[0]))[
        :_POPULAR
    ]
    sizes = {n for n in default_ladder(max_tokens) if n <= _FINE_UP_TO or n % _COARSE == 0 or n == max_tokens}
    sizes |= {n for n in _BETWEEN if n < max_tokens}
    sizes |= {min(max_tokens, -(-n // 8) * 8) for n, _ in popular}
    return tuple(sorted(sizes))


class Costs:
    """Seconds of every token count by every candidate, from the timings.

    The compiled route is taken to be linear between a candidate and one token more than the one below it.

    Args:
        timings: of the candidates; the largest is the largest count that is looked at.
        lengths: (token count, weight) of the calls to expect; empty = every size of call alike on a log scale, which
            gives a count n the weight 1 / n, as it is where all are above the largest candidate.
        max_padding: a bucket above 64 tokens serves no fewer tokens than a ``max_padding``-th of it.

    Attributes:
        beyond: of ``lengths`` those above the largest candidate, with their share of all: no ladder serves them, so
            they have no weight.
        by_lengths: whether the weights are those of the others; else they are 1 / n.

    Raises:
        ValueError: there is no timing, or two of one size, or one that is not above 0.
    """

    FREE_PADDING: ClassVar[int] = 64

    def __init__(
        self, timings: Sequence[Timing], lengths: Sequence[tuple[int, float]] = (), max_padding: float = math.inf
    ) -> None:
        timings = sorted(timings, key=lambda t: t.tokens)
        self.sizes = [t.tokens for t in timings]
        if not timings or len(set(self.sizes)) != len(timings) or self.sizes[0] < 1:
            raise ValueError(f"timings must name each size once, and at least one; got sizes {self.sizes}")
        if not all(math.isfinite(s) and s > 0 for t in timings for s in (t.replay, t.compiled, t.compiled_low)):
            raise ValueError("every timing must be a number of seconds above 0")
        self.most = self.sizes[-1]
        self.replay = [t.replay for t in timings]
        counts = np.arange(1, self.most + 1)
        at, seconds = [], []
        for low, t in zip([0, *self.sizes], timings, strict=False):
            at += [low + 1, t.tokens] if t.tokens > low + 1 else [t.tokens]
            seconds += [t.compiled_low, t.compiled] if t.tokens > low + 1 else [t.compiled]
        self.compiled = np.interp(counts, at, seconds)
        # Over the largest, so that they can be added up whatever they are.
        largest = max((w for _, w in lengths if w > 0), default=1.0)
        calls = [(n, w / largest) for n, w in sorted(lengths) if n >= 1 and w > 0]
        known = [(n, w) for n, w in calls if n <= self.most]
        total = sum(w for _, w in calls)
        self.beyond = tuple((n, w / total) for n, w in calls if n > self.most)
        self.by_lengths = bool(known)
        self.weights = np.zeros(self.most) if known else 1.0 / counts
        for n, w in known:
            self.weights[n - 1] += w
        self.weights /= self.weights.sum()
        self.max_padding = max_padding
        self.least = [self._least(b, s) for b, s in zip(self.sizes, self.replay, strict=True)]
        self.best = self.compiled.copy()
        for bucket, least, replay in zip(self.sizes, self.least, self.replay, strict=True):
            served = self.best[least - 1 : bucket]
            np.minimum(served, replay, out=served)

    def _least(self, bucket: int, replay: float) -> int:
        """Fewest tokens from which on the bucket's graph is no slower than the compiled route, and may be padded to;
        above it = none."""
        slower = np.flatnonzero(self.compiled[:bucket] < replay)
        least = int(slower[-1]) + 2 if len(slower) else 1
        if bucket > self.FREE_PADDING and math.isfinite(self.max_padding):
            least = max(least, math.ceil(bucket / self.max_padding))
        return least

    def share(self, seconds: np.ndarray) -> np.ndarray:
        """Weighted time over the least time that any candidate, or the compiled route, takes: each call counts alike,
        a short one as much as a long one."""
        return self.weights * seconds / self.best

    def with_bucket(self, i: int) -> np.ndarray:
        """Seconds of every count up to candidate ``i`` if that is its bucket, the compiled route where it is faster."""
        seconds = self.compiled[: self.sizes[i]].copy()
        seconds[self.least[i] - 1 :] = self.replay[i]
        return seconds

    def of(self, ladder: Sequence[int], *, measured: bool = True) -> float:
        """Mean time of a call over the least that any candidate gives it; 1.0 = no call could be faster.

        Args:
            ladder: buckets, which need not be candidates: what lies between those is taken to be linear, and may be
                faster than any.
            measured: whether calls that are faster by the compiled route take it.
        """
        seconds = self.compiled.copy()
        low = 0
        for bucket in sorted(b for b in ladder if b <= self.most):
            replay = float(np.interp(bucket, self.sizes, self.replay))
            first = max(low, self._least(bucket, replay if measured else 0.0) - 1)
            seconds[first:bucket] = replay
            low = bucket
        return float(self.share(seconds).sum())
