"""Which buckets to capture, decided once at the first capture: memory is forecast, candidate sizes are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.bucket import address_count
from fullgraph_compile.capture import CaptureSet
from fullgraph_compile.dispatch import Limits, Reason
from fullgraph_compile.forecast import forecast, probe_sizes
from fullgraph_compile.ladder import capture_lengths, slots_of
from fullgraph_compile.ladder_costs import Timing
from fullgraph_compile.measured_ladder import Forecast, MeasuredLadder, choose_ladder
from fullgraph_compile.progress import phase, steps
from fullgraph_compile.report import log
from fullgraph_compile.staging import metadata_bytes

if TYPE_CHECKING:
    from fullgraph_compile.cache import PagedKVCache
    from fullgraph_compile.runner import BodyRunner

MIB = 2**20


@dataclass(frozen=True)
class Fitting:
    """What the user said of the choice.

    Attributes:
        measured: whether sizes are timed; else the ladder is kept, as far as the budget allows.
        lengths: (token count, weight) of the calls to expect.
        budget: bytes that graphs may take; None = no limit.
    """

    measured: bool = False
    lengths: tuple[tuple[int, float], ...] = ()
    budget: int | None = None


def fit(runner: BodyRunner, fitting: Fitting, args: Sequence[Any], cache: PagedKVCache | None) -> Limits:
    """The runner's limits with the ladder that is to be captured; the report is told what was left out and why.

    Args:
        args: values of the placeholders.
        cache: the KV cache that the graphs will read and write.
    """
    limits = runner.limits_over(cache)
    try:
        expected = _forecast(runner, limits, args, cache)
    except Exception as error:
        # Each bucket will say so of itself when it is captured.
        runner.raise_if_lost(error)
        log.warning("%s: no forecast of the graphs' memory, and no choice of buckets: %s", runner.report.name, error)
        return runner.limits
    # Of sizes that are only timed no more need to fit at once than one.
    fits = expected.cut(limits.ladder, fitting.budget, count=1 if fitting.measured else None)
    kept = fits
    measured: MeasuredLadder | None = None
    if fitting.measured and kept:
        groups = _groups(kept, expected, fitting.budget)
        timings = _measure(runner, limits, groups, args, cache)
        if timings:
            measured = choose_ladder(
                timings,
                fitting.lengths,
                max_padding=limits.max_padding,
                forecast=expected,
                budget=fitting.budget,
                untimed=tuple(set(limits.ladder) - {t.tokens for t in timings}),
            )
            kept = measured.buckets
    fitted = replace(runner.limits, ladder=kept)
    report, name = runner.report, runner.report.name
    report.forecast_bytes = expected.bytes(len(kept), kept[-1]) if kept else 0
    report.ladder = measured
    if measured is not None:
        log.info("%s: %s", name, measured.summary())
        fitted = replace(fitted, least=tuple(zip(kept, measured.least, strict=True)))
        if not kept or kept[-1] < limits.ladder[-1]:
            fitted = replace(fitted, above=(limits.ladder[-1], Reason.CROSSOVER))
            top = f"up to {kept[-1]} tokens" if kept else "for no size"
            report.details[Reason.CROSSOVER] = f"graphs pay {top}"
    said = _cut(limits.ladder, kept, fits, expected, fitting, measured)
    if said:
        log.warning("%s: %s", name, said)
        report.cut = report.details[Reason.MEMORY] = said
        if fits != limits.ladder or (measured is not None and measured.wanted[-1] not in kept):
            fitted = replace(fitted, above=(limits.ladder[-1], Reason.MEMORY))
    return fitted


def _cut(
    ladder: Sequence[int],
    kept: Sequence[int],
    fits: Sequence[int],
    expected: Forecast,
    fitting: Fitting,
    measured: MeasuredLadder | None,
) -> str:
    """What the budget left out, in words; empty = nothing."""
    if fitting.budget is None:
        return ""
    untimed = [b for b in ladder if b not in fits] if fitting.measured else []
    wanted = measured.wanted if measured else fits if fitting.measured else ladder
    missing = [b for b in wanted if b not in kept]
    said = []
    if untimed:
        alone = expected.bytes(1, untimed[0]) / MIB
        said.append(
            f"{', '.join(map(str, untimed))} were not timed, as a graph of {untimed[0]} alone takes {alone:.1f}"
        )
    if missing:
        takes = expected.bytes(len(wanted), wanted[-1]) / MIB
        said.append(f"{len(wanted)} buckets were forecast to take {takes:.1f}: left out {', '.join(map(str, missing))}")
    if not said:
        return ""
    left = f"{len(kept)} are left, {expected.bytes(len(kept), kept[-1]) / MIB:.1f} MiB" if kept else "none is left"
    return f"memory_budget is {fitting.budget / MIB:.1f} MiB, {'; '.join([*said, left])}"


def _forecast(runner: BodyRunner, limits: Limits, args: Sequence[Any], cache: PagedKVCache | None) -> Forecast:
    assert runner.recorder is not None
    buckets = [(tokens, slots_of(tokens, limits.slots)) for tokens in limits.ladder]
    metadata = metadata_bytes(buckets, limits.context_length, cache, address_count(runner.inputs, runner.outputs))
    probes = _set(runner, replace(limits, ladder=probe_sizes(limits.ladder)), args, cache)
    try:
        with phase("forecasting memory", show=runner.show_progress), runner.recorder.session():
            return forecast(probes, runner.recorder, args, metadata)
    finally:
        probes.close()


def _groups(sizes: Sequence[int], expected: Forecast, budget: int | None) -> list[list[int]]:
    """Sizes whose graphs fit the budget together, largest first."""
    groups: list[list[int]] = []
    for tokens in sorted(sizes, reverse=True):
        if groups and (budget is None or expected.bytes(len(groups[-1]) + 1, groups[-1][0]) <= budget):
            groups[-1].append(tokens)
        else:
            groups.append([tokens])
    return groups


def _measure(
    runner: BodyRunner, limits: Limits, groups: list[list[int]], args: Sequence[Any], cache: PagedKVCache | None
) -> tuple[Timing, ...]:
    """Time the graph of every candidate, and the compiled route at its size and at the smallest that it would serve.

    Candidates that cannot be captured are left out.

    Args:
        groups: the candidates, those of a group captured at the same time.
    """
    replays: dict[int, float] = {}
    for group in groups:
        replays |= _replays(runner, replace(limits, ladder=tuple(sorted(group))), args, cache)

    def compiled(tokens: int) -> float:
        return seconds(partial(runner.exact, *_call(runner, tokens, limits, args, cache)), runner.device)

    timings = []
    sizes = sorted(replays)
    pairs = [*zip([0, *sizes], sizes, strict=False)]
    for below, tokens in steps(pairs, "timing without graphs", show=runner.show_progress):
        full = compiled(tokens)
        timings.append(Timing(tokens, replays[tokens], full, compiled(below + 1) if tokens > below + 1 else full))
    return tuple(timings)


def _replays(runner: BodyRunner, limits: Limits, args: Sequence[Any], cache: PagedKVCache | None) -> dict[int, float]:
    """Seconds of a replay of each size that can be captured."""
    assert runner.recorder is not None
    graphs = _set(runner, limits, args, cache)
    try:
        with runner.recorder.session():
            failed = graphs.capture(runner.recorder, args, show_progress=runner.show_progress)
        found = {}
        for tokens in steps([b for b in limits.ladder if b not in failed], "timing graphs", show=runner.show_progress):
            call = _call(runner, tokens, limits, args, cache)
            found[tokens] = seconds(partial(graphs.replay, tokens, *call, None), runner.device)
        return found
    finally:
        graphs.close()


def _set(runner: BodyRunner, limits: Limits, args: Sequence[Any], cache: PagedKVCache | None) -> CaptureSet:
    return CaptureSet(runner.program, runner.inputs, runner.outputs, limits, runner.device, cache, args)


def _call(
    runner: BodyRunner, tokens: int, limits: Limits, args: Sequence[Any], cache: PagedKVCache | None
) -> tuple[list[Any], PrefillBatch]:
    """A call of ``tokens`` that writes to no request's pages."""
    values = list(args)
    for i, dim in runner.inputs.tokens.items():
        shape = list(args[i].shape)
        shape[dim] = tokens
        values[i] = torch.zeros(shape, dtype=args[i].dtype, device=args[i].device)
    for i in runner.inputs.sizes:
        values[i] = tokens
    lengths = capture_lengths(tokens, limits.context_length, limits.slots)
    assert lengths is not None, "what is below a legal bucket is legal"
    return values, PrefillBatch.for_capture(lengths, cache, runner.device)


# A call is timed so often, or until so many seconds have gone by.
_REPEATS, _ENOUGH = (3, 15), 0.15


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median wall time of a call until its result is ready, with the device idle before it."""
    found: list[float] = []
    call()
    while len(found) < _REPEATS[0] or (len(found) < _REPEATS[1] and sum(found) < _ENOUGH):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
