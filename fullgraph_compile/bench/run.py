"""The bench: every route by token count, the limit, padding, host time and start-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

import fullgraph_compile as fgc
from fullgraph_compile.bench.limits import Limit, measure_limit
from fullgraph_compile.bench.models import projections, vocabulary
from fullgraph_compile.bench.names import NEEDS_CUDA, PLAIN
from fullgraph_compile.bench.random_lengths import Beyond, between, play, random_lengths
from fullgraph_compile.bench.routes import Ours, first_call, forget, is_graph, plain_route, random_ids
from fullgraph_compile.bench.timing import machine, median_ms
from fullgraph_compile.report import first_lines


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        sizes: token counts, one request each.
        routes: of ``routes.ROUTES``.
        options: of ``fgc.compile``.
        repeats: calls for each time.
        random: calls of random lengths; 0 = none.
        random_s: most seconds for them, for each route.
    """

    sizes: tuple[int, ...]
    routes: tuple[str, ...]
    options: dict[str, Any]
    repeats: int = 50
    random: int = 0
    random_s: float = 60.0


@dataclass
class Result:
    """What was measured; times are ms of a whole call, in the median.

    Attributes:
        limit: None where no weights are known that every call reads, or it was not measured.
        times: route -> token count -> ms.
        host: token count -> ms until a call of full_prefill returns, with the device idle.
        buckets: token count -> the bucket that full_prefill replays; None = the compiled route.
        start_up: route -> seconds of its first call; of full_prefill until every bucket is captured.
        memory_bytes: device memory that getting ready took, by the driver's count.
        random: route -> totals of calls of random lengths.
        not_measured: what, and why.
        failed: routes that could not be measured, or not wholly, though this machine has what they need.
        interrupted: whether Ctrl-C ended it.
    """

    machine: str
    model: str
    dtype: str
    limit: Limit | None = None
    times: dict[str, dict[int, float]] = field(default_factory=dict)
    host: dict[int, float] = field(default_factory=dict)
    buckets: dict[int, int | None] = field(default_factory=dict)
    start_up: dict[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    random: dict[str, Beyond] = field(default_factory=dict)
    not_measured: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    interrupted: bool = False
    report: str = ""

    @property
    def sizes(self) -> list[int]:
        """Token counts of which any route was timed, ascending."""
        return sorted({n for times in self.times.values() for n in times})

    def limit_ms(self, tokens: int) -> float | None:
        """Ms that no forward of so many tokens can be faster than; None where that is not known."""
        return None if self.limit is None else self.limit.ms(tokens)

    def fail(self, routes: Iterable[str], what: str, error: Exception) -> None:
        """Note that an error kept routes from being measured."""
        self.not_measured.append(f"{what}: {first_lines(error, 1)}")
        self.failed += [r for r in routes if r not in self.failed]

    def slower_than_compiled(self) -> tuple[int, float] | None:
        """The token count at which full_prefill is slowest against its own pieces without graphs, and that ratio."""
        ours, without = self.times.get("full_prefill", {}), self.times.get("compiled", {})
        both = [(ours[n] / without[n], n) for n in ours if n in without]
        return (max(both)[1], max(both)[0]) if both else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "limit_ms": {n: self.limit_ms(n) for n in self.sizes},
            "random": {name: {**asdict(b), "beyond_ms": b.beyond_ms} for name, b in self.random.items()},
        }


def bench(body: nn.Module, name: str, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Result:
    """Measure a body; it is compiled in place at the end.

    Routes that are none of ours come first, as ``fgc.compile`` moves weights together.  A route that fails is reported
    as not measured; so is the rest at an interrupt.

    Args:
        say: told what is measured now.
    """
    dtype = next(body.parameters()).dtype
    result = Result(machine(), name, str(dtype).removeprefix("torch."))
    try:
        if weights := projections(body):
            say("memory bandwidth and matrix rate")
            result.limit = measure_limit(weights, dtype, device)
        for route in (r for r in PLAIN if r in settings.routes):
            say(route)
            if route in NEEDS_CUDA and device.type != "cuda":
                result.not_measured.append(f"{route}: needs a GPU")
                continue
            try:
                _plain(result, route, body, device, settings)
            except Exception as error:
                result.fail([route], route, error)
            forget(device)
        ours = [r for r in settings.routes if r not in PLAIN]
        if ours:
            try:
                _ours(result, body, device, settings, say)
            except Exception as error:
                able = [r for r in ours if r not in NEEDS_CUDA or device.type == "cuda"]
                result.fail(able, "the rest of full_prefill", error)
    except KeyboardInterrupt:
        result.interrupted = True
        result.not_measured.append("the rest: interrupted")
    return result


def _plain(result: Result, route: str, body: nn.Module, device: torch.device, settings: Settings) -> None:
    call, words = plain_route(route, body), vocabulary(body)
    inputs = {n: random_ids(words, n, device) for n in settings.sizes}
    result.start_up[route] = first_call(call, inputs[settings.sizes[0]][0], device)
    times = result.times[route] = {}
    for n, ids in inputs.items():
        times[n] = median_ms(call, ids, device, repeats=settings.repeats)
    if settings.random and route == "reduce-overhead":
        lengths = random_lengths(settings.random, max(settings.sizes))
        result.random[route] = play(
            call, lengths, between(times), device, vocabulary=words, at_most_s=settings.random_s
        )


def _ours(
    result: Result, body: nn.Module, device: torch.device, settings: Settings, say: Callable[[str], None]
) -> None:
    say("full_prefill: compiling and capturing")
    ours, words = Ours(body, device, settings.options), vocabulary(body)
    ours.start()
    result.start_up["full_prefill"], result.memory_bytes = ours.ready_s, ours.memory_bytes
    inputs = {n: random_ids(words, n, device) for n in settings.sizes}
    times = {route: result.times.setdefault(route, {}) for route in settings.routes if route not in PLAIN}
    for n, ids in inputs.items():
        say(f"full_prefill and its pieces: {n} tokens")
        decision = ours.decision(n)
        result.buckets[n] = decision.bucket if is_graph(decision) else None
        if "compiled" in times:
            with ours.without_graphs():
                times["compiled"][n] = median_ms(ours, ids, device, repeats=settings.repeats)
        if "full_prefill" in times:
            times["full_prefill"][n] = median_ms(ours, ids, device, repeats=settings.repeats)
            result.host[n] = median_ms(ours, ids, device, repeats=settings.repeats, wait=False)
        if "pieces" in times and device.type == "cuda" and is_graph(decision):
            assert decision.bucket is not None
            try:
                with ours.pieces(decision.bucket, ids[0]) as call:
                    times["pieces"][n] = median_ms(call, ids, device, repeats=settings.repeats)
            except Exception as error:
                result.fail(["pieces"], f"pieces of {n} tokens", error)
    if "pieces" in times and device.type != "cuda":
        result.not_measured.append("pieces: needs a GPU")
    result.report = str(fgc.report(body))
    if settings.random and "full_prefill" in times:
        say("full_prefill: random lengths")
        _random(result, ours, device, settings, words)


def _alone(launch: Callable[[], None]) -> Callable[[Any], None]:
    return lambda _: launch()


def _random(result: Result, ours: Ours, device: torch.device, settings: Settings, words: int) -> None:
    replays: dict[int, float] = {}
    for tokens, bucket in ours.runner.buckets.items():
        if bucket.graph is not None and ours.decision(tokens).bucket == tokens:
            # A graph reads the metadata that were staged last, and buckets share their buffers: of a longer call, they
            # would lead past its end.
            ours(random_ids(words, tokens, device, count=1)[0])
            replays[tokens] = median_ms(_alone(ours.runner.relaunch(tokens)), [torch.empty(0)], device, repeats=10)
    compiled = between(result.times.get("compiled") or result.times["full_prefill"])

    def alone(n: int) -> float:
        decision = ours.decision(n)
        return replays[decision.bucket] if is_graph(decision) and decision.bucket in replays else compiled(n)

    lengths = random_lengths(settings.random, max(settings.sizes))
    result.random["full_prefill"] = play(ours, lengths, alone, device, vocabulary=words, at_most_s=settings.random_s)
