"""What was captured, proven, replayed and refused: counted as it happens, read as a report."""

from __future__ import annotations

import io
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from fullgraph_compile.dispatch import FallbackError, Reason
from fullgraph_compile.measured_ladder import MeasuredLadder
from fullgraph_compile.ops import AttentionSite

log = logging.getLogger("fullgraph_compile")

# What is counted of the user's calls.
_COUNTS = ("replays", "padding", "dropped", "fallbacks", "device_reads")


class _Own(threading.local):
    """Whether this thread's calls are our own."""

    calls = False


_own = _Own()


@contextmanager
def own_calls() -> Iterator[None]:
    """Within it this thread's calls are not the user's, so ``strict`` does not hold for them."""
    before, _own.calls = _own.calls, True
    try:
        yield
    finally:
        _own.calls = before


@dataclass
class Report:
    """One compiled body, or several merged.

    Attributes:
        name: what was compiled, in words.
        buckets: token buckets with a captured graph, ascending.
        slots: request slots of the largest bucket.
        sites: the attention calls, with module path, heads, head sizes and mask kind.
        proof: the result of the padding proof, in words.
        replays: graph launches by bucket whose result was given to the caller.
        padding: padded rows by bucket, summed over its replays.
        dropped: launches by bucket whose result was thrown away: the module had changed, or what came out of it is not
            what the caller's form of the call can be made of.
        fallbacks: calls that replayed no graph, by reason.
        details: for a reason, what it was about the first time: a node and source line, a limit, an exception.
        compiles: graphs that Dynamo handed over.
        pieces: distinct pieces that were compiled.
        cached_pieces: those of them that were found in torch's caches on disk.
        compile_seconds: wall time of compiling the pieces.
        capture_seconds: wall time of warm-up and capture.
        graph_bytes: device memory that capture took; 0 on a CPU.
        forecast_bytes: what it was forecast to take before anything was captured; 0 where it was not.
        cut: which buckets ``memory_budget`` left out, in words.
        ladder: what was measured and chosen under ``buckets="measured"``.
        routes: which way each bucket runs, with what was measured, in words; empty where nothing was.
        device_reads: calls that had to read positions from the device to tell requests apart.
        ready: whether every bucket is captured or turned off.
    """

    name: str = ""
    buckets: tuple[int, ...] = ()
    slots: int = 0
    sites: tuple[AttentionSite, ...] = ()
    proof: str = ""
    replays: Counter[int] = field(default_factory=Counter)
    padding: Counter[int] = field(default_factory=Counter)
    dropped: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    details: dict[Reason, str] = field(default_factory=dict)
    compiles: int = 0
    pieces: int = 0
    cached_pieces: int = 0
    compile_seconds: float = 0.0
    capture_seconds: float = 0.0
    graph_bytes: int = 0
    forecast_bytes: int = 0
    cut: str = ""
    ladder: MeasuredLadder | None = None
    routes: tuple[str, ...] = ()
    device_reads: int = 0
    ready: bool = False
    # Launches of the call that is being made, which may be dropped yet; None = nobody drops any.
    _launched: list[tuple[int, int]] | None = field(default=None, repr=False, compare=False)

    def replayed(self, bucket: int, tokens: int) -> None:
        """Count one launch of ``bucket`` for ``tokens`` real rows."""
        self.replays[bucket] += 1
        self.padding[bucket] += bucket - tokens
        if self._launched is not None:
            self._launched.append((bucket, tokens))

    def begin(self) -> None:
        """A call begins whose launches ``drop`` can take back."""
        self._launched = []

    def drop(self) -> None:
        """What was launched since ``begin`` gave nothing to the caller: it is counted apart."""
        for bucket, tokens in self._launched or ():
            self.replays[bucket] -= 1
            self.padding[bucket] -= bucket - tokens
            self.dropped[bucket] += 1
        self._launched = []

    def fell_back(self, reason: Reason, detail: str = "", *, strict: bool = False) -> None:
        """Count a call that replays no graph, and log it the first time that its reason occurs.

        Raises:
            FallbackError: under ``strict``, unless the call is one of our own.
        """
        self.fallbacks[reason] += 1
        text = f"{self.name}: no graph replayed: {_words(reason, detail)}"
        if reason not in self.details:
            self.details[reason] = detail
            log.warning("%s; said once, counted in fgc.report()", text)
        if strict and not _own.calls:
            raise FallbackError(text)

    def take_counts(self, then: Report) -> None:
        """Count the user's calls as they were in an earlier ``copy``: what came between were calls of our own."""
        for name in (*_COUNTS, "_launched"):
            setattr(self, name, getattr(then, name))

    def why(self) -> str:
        """Every reason that was met, with what it was about the first time."""
        return "; ".join(_words(reason, detail) for reason, detail in self.details.items())

    def copy(self) -> Report:
        """A snapshot that later calls do not change."""
        return replace(
            self,
            **{name: copy(getattr(self, name)) for name in (*_COUNTS, "_launched")},
            details=dict(self.details),
        )

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=110, color_system=None)
        console.print(self._summary(), highlight=False)
        if self.buckets:
            console.print(self._bucket_table())
        if self.fallbacks:
            console.print(self._fallback_table())
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _summary(self) -> str:
        state = ("ready" if self.buckets else "no graphs") if self.ready else "not captured yet"
        lines = [f"{self.name or 'nothing compiled'}: {state}"]
        if self.sites:
            lines.append(f"  attention: {', '.join(_site_groups(self.sites))}")
        if self.proof:
            lines.append(f"  padding: {self.proof}")
        cached = f" ({self.cached_pieces} of {self.pieces} pieces from the cache)" if self.cached_pieces else ""
        forecast = f" ({self.forecast_bytes / 2**20:.0f} forecast)" if self.forecast_bytes else ""
        lines.append(
            f"  compiled {self.compiles} graph{'s' * (self.compiles != 1)} in {self.compile_seconds:.1f} s{cached}, "
            "captured "
            f"{len(self.buckets)} bucket{'s' * (len(self.buckets) != 1)} in {self.capture_seconds:.1f} s, "
            f"{self.graph_bytes / 2**20:.0f} MiB of graphs{forecast}, {self.slots} request slots"
        )
        lines += [f"  {line}" for line in (self.ladder.summary().splitlines() if self.ladder else ())]
        if self.cut:
            lines.append(f"  {self.cut}")
        lines += [f"  {line}" for line in self.routes]
        replays, fallbacks = sum(self.replays.values()), sum(self.fallbacks.values())
        if replays + fallbacks:
            count = self.dropped.total()
            thrown = f", {count} more launch{'es' * (count != 1)} thrown away" if count else ""
            read = f", {self.device_reads} read positions from the device" if self.device_reads else ""
            lines.append(f"  calls: {replays} replayed, {fallbacks} not{read}{thrown}")
        elif self.details and not self.buckets:
            # As after a warm-up, whose calls are not counted.
            lines.append(f"  why: {self.why()}")
        return "\n".join(lines)

    def _bucket_table(self) -> Table:
        table = Table("bucket", "replays", "real rows", "padded rows", "padding")
        for column in table.columns:
            column.justify = "right"
        for bucket in self.buckets:
            rows = bucket * self.replays[bucket]
            padded = self.padding[bucket]
            share = f"{padded / rows:.0%}" if rows else "-"
            table.add_row(str(bucket), str(self.replays[bucket]), str(rows - padded), str(padded), share)
        return table

    def _fallback_table(self) -> Table:
        table = Table("calls", "why no graph was replayed", "first time")
        table.columns[0].justify = "right"
        for reason, count in self.fallbacks.most_common():
            table.add_row(str(count), reason.value, self.details.get(reason, ""))
        return table


def first_lines(error: BaseException, most: int) -> str:
    """The kind of an error and its first lines that are not empty, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:most])}"


def _words(reason: Reason, detail: str) -> str:
    return f"{reason.value} ({detail})" if detail else reason.value


def _site_groups(sites: Iterable[AttentionSite]) -> list[str]:
    """``28 x 9/3 heads of 64, causal``: sites that compute the same, counted."""
    groups: Counter[str] = Counter()
    for s in sites:
        size = f"{s.head_size}" if s.head_size == s.value_head_size else f"{s.head_size}/{s.value_head_size}"
        extras = [f"soft cap {s.softcap:g}"] if s.softcap else []
        extras += ["sinks"] if s.sinks else []
        extras += ["slopes"] if s.slopes else []
        groups[", ".join([f"{s.heads}/{s.kv_heads} heads of {size}", s.mask, *extras])] += 1
    return [f"{count} x {group}" for group, count in groups.items()]


def merge(reports: Iterable[Report]) -> Report:
    """One report of several bodies: counts added, texts of the first."""
    merged: Report | None = None
    for report in reports:
        if merged is None:
            merged = report.copy()
            continue
        merged.buckets = tuple(sorted({*merged.buckets, *report.buckets}))
        merged.slots = max(merged.slots, report.slots)
        merged.sites = merged.sites or report.sites
        if report.proof and report.proof not in merged.proof:
            merged.proof = "; ".join(filter(None, (merged.proof, report.proof)))
        for count in _COUNTS:
            setattr(merged, count, getattr(merged, count) + getattr(report, count))
        merged.details = {**report.details, **merged.details}
        merged.compiles += report.compiles
        merged.pieces += report.pieces
        merged.cached_pieces += report.cached_pieces
        merged.compile_seconds += report.compile_seconds
        merged.capture_seconds += report.capture_seconds
        merged.graph_bytes += report.graph_bytes
        merged.forecast_bytes += report.forecast_bytes
        merged.ladder = merged.ladder or report.ladder
        merged.cut = "; ".join(dict.fromkeys(filter(None, (merged.cut, report.cut))))
        merged.ready = merged.ready and report.ready
    return merged or Report()
