"""Calls of random lengths one after the other: what they take beyond the replays themselves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fullgraph_compile.bench.interrupts import raise_if_interrupted
from fullgraph_compile.bench.routes import Call
from fullgraph_compile.bench.timing import synchronize


@dataclass(frozen=True)
class Beyond:
    """Totals over a series of calls.

    Attributes:
        calls: how many were made; fewer than asked where time ran out.
        total_s: from the first call until the last result is ready, each waited for.
        replays_s: what the forwards alone take once everything is recorded.
    """

    calls: int
    total_s: float
    replays_s: float

    @property
    def beyond_ms(self) -> float:
        """What a call took beyond its replay, in ms, in the mean."""
        return (self.total_s - self.replays_s) / max(1, self.calls) * 1e3


def random_lengths(count: int, most: int, seed: int = 0) -> list[int]:
    """Lengths from 1 to ``most``, each alike."""
    pick = random.Random(seed)
    return [pick.randint(1, most) for _ in range(count)]


def play(
    call: Call,
    lengths: Sequence[int],
    replay_ms: Callable[[int], float],
    device: torch.device,
    *,
    vocabulary: int,
    at_most_s: float,
) -> Beyond:
    """Make the calls in turn until they are done or the time is over.

    Args:
        replay_ms: what the forward of a length takes in the long run.
    """
    ids = torch.randint(vocabulary, (max(lengths),), device=device)
    total = replays = 0.0
    calls = 0
    for n in lengths:
        if total >= at_most_s:
            break
        raise_if_interrupted()
        # A copy of a slice [1, n] would keep the strides of the whole, for which torch.compile compiles anew.
        tokens: Tensor = ids[:n].clone()[None]
        synchronize(device)
        start = time.perf_counter()
        call(tokens)
        synchronize(device)
        total += time.perf_counter() - start
        replays += replay_ms(n) / 1e3
        calls += 1
    return Beyond(calls, total, replays)


def between(measured: dict[int, float]) -> Callable[[int], float]:
    """A time by token count from times of some, taken to be linear between them."""
    sizes = sorted(measured)
    values = [measured[n] for n in sizes]
    return lambda n: float(np.interp(n, sizes, values))
