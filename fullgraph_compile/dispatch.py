"""The decision for one call: a pure function of the batch, the ladder and the limits."""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import ClassVar

from fullgraph_compile.ladder import legal_buckets


class Reason(enum.Enum):
    """Why a call did not replay a graph.  The value is what a person reads."""

    OVER_LADDER = "more tokens than the largest bucket"
    OVER_SLOTS = "more requests than request slots"
    OVER_CONTEXT = "a request is longer than context_length"
    PADDING = "the nearest bucket would be mostly padding (max_padding)"
    CROSSOVER = "measured: without a graph such a call is as fast or faster"
    MEMORY = "its bucket was left out to stay within memory_budget"
    EMPTY = "the batch has no new tokens"
    SINGLE_REQUEST = "the body is proven for one request a call, and the batch has more"
    UNPROVEN = "padding is not proven safe for this body"
    STATIC_SHAPE = "the graph was traced for one fixed token count"
    BATCHED = "a batch dim above 1 (call with packed [1, T] tokens; fgc.compile packs for transformers models)"
    UNMARKED = "an attention call was not understood"
    NO_SITES = "no attention call was found in the traced graph"
    ATTENTION = "no attention backend supports every attention call here"
    GRAD = "gradients are enabled"
    TRAINING = "the module is in training mode"
    GRAPHS_OFF = "graphs are off (graphs='none', or 'auto' without a GPU)"
    NO_BUCKET = "no bucket is legal under context_length and request_slots"
    CAPTURE_FAILED = "capturing this bucket failed"
    REPLAY_FAILED = "replaying this bucket failed"
    NOT_COMPILED = "the compiler failed on this graph"
    NOT_TRACED = "the body could not be traced into one graph"
    WEIGHTS_MOVED = "a weight was replaced or moved since capture"
    CHANGED = "the module changed since it was traced, so the call was made again"
    NOT_LASTING = "a call changes what it was traced for (a hook that keeps or counts something)"
    INTERPOSED = "something is to see each operation or module call, which a replay would pass by"
    PASSED_BY = "the model did not call the body that was compiled"
    OFFLOADED = "the weights are moved at each call, or lie on several devices"
    SCALAR_INPUT = "a number or a CPU scalar is an input whose value the graph uses"
    MASK = "a mask was given that is neither packed away nor proven trivial"
    ARGUMENTS = "the call's arguments are not ones that a graph can serve"
    DISABLED = "FULLGRAPH_COMPILE_DISABLE is set"
    CLOSED = "close() was called while the call waited"


class Route(enum.Enum):
    """How a call runs: one graph launch, the same compiled pieces at exact sizes, or the original call."""

    GRAPH = "graph"
    COMPILED = "compiled"
    EAGER = "eager"


# Padding is not known to be safe: an error under ``unsafe="error"``.
NOT_SAFE = frozenset({Reason.UNPROVEN, Reason.UNMARKED})


class FallbackError(RuntimeError):
    """Raised under ``strict`` where a call would not replay a graph."""


class RequestsMeet(FallbackError):
    """The requests of a batch cannot be served apart: an error inside a batch of the caller's own.

    Args:
        name: of the body.
        batch: the batch.
        why: what makes them meet.
    """

    def __init__(self, name: str, batch: object, why: str) -> None:
        super().__init__(f"{name} cannot be called with {batch!r}: {why}")
        self.why = why


@dataclass(frozen=True)
class Limits:
    """What the captured graphs can serve.

    ``off`` maps a bucket to the reason that turned it off; ``blocked`` is a reason that holds for every call;
    ``open_context`` says that a KV cache's own limit takes the place of ``context_length``.  ``least`` maps a bucket to
    the fewest tokens that it serves, where that was measured; ``above`` is why counts above the ladder, up to a count,
    have no bucket.
    """

    ladder: tuple[int, ...]
    slots: int
    context_length: int
    max_padding: float = 2.0
    single_request: bool = False
    blocked: Reason | None = None
    off: tuple[tuple[int, Reason], ...] = ()
    open_context: bool = False
    least: tuple[tuple[int, int], ...] = ()
    above: tuple[int, Reason] | None = None

    # Up to this many tokens a forward costs the same, so padding is free.
    FREE_PADDING: ClassVar[int] = 64

    def over_cache(self, capacity: int) -> Limits:
        """The limits of calls over a KV cache that holds ``capacity`` tokens."""
        return _over_cache(self, capacity) if self.open_context else self


@lru_cache(maxsize=64)
def _over_cache(limits: Limits, capacity: int) -> Limits:
    ladder = legal_buckets(limits.ladder, capacity, limits.slots)
    blocked = limits.blocked or (None if ladder else Reason.NO_BUCKET)
    return replace(limits, ladder=ladder, context_length=capacity, blocked=blocked)


@dataclass(frozen=True)
class Decision:
    route: Route
    bucket: int | None = None
    reason: Reason | None = None

    def __str__(self) -> str:
        if self.route is Route.GRAPH:
            return f"graph, bucket {self.bucket}"
        return f"{self.route.value}: {self.reason.value if self.reason else ''}"


def decide(tokens: int, requests: int, longest: int, limits: Limits) -> Decision:
    """Route and bucket of a batch; touches nothing.

    Args:
        tokens: new tokens of all requests.
        requests: number of requests.
        longest: cached and new tokens of the longest request.
    """
    if limits.blocked is not None:
        return Decision(Route.COMPILED, None, limits.blocked)
    if tokens == 0:
        return Decision(Route.COMPILED, None, Reason.EMPTY)
    if limits.single_request and requests > 1:
        return Decision(Route.COMPILED, None, Reason.SINGLE_REQUEST)
    at = bisect.bisect_left(limits.ladder, tokens)
    if at == len(limits.ladder):
        left_out = limits.above is not None and tokens <= limits.above[0]
        return Decision(Route.COMPILED, None, limits.above[1] if left_out and limits.above else Reason.OVER_LADDER)
    if longest > limits.context_length:
        return Decision(Route.COMPILED, None, Reason.OVER_CONTEXT)
    bucket = limits.ladder[at]
    if requests > limits.slots or requests > bucket:  # a bucket has no more slots than rows: ``ladder.slots_of``
        return Decision(Route.COMPILED, None, Reason.OVER_SLOTS)
    if bucket > limits.FREE_PADDING and bucket > limits.max_padding * tokens:
        return Decision(Route.COMPILED, None, Reason.PADDING)
    for measured, least in limits.least:
        if measured == bucket and tokens < least:
            return Decision(Route.COMPILED, None, Reason.CROSSOVER)
    for turned_off, why in limits.off:
        if turned_off == bucket:
            return Decision(Route.COMPILED, bucket, why)
    return graph_of(bucket)


@cache
def graph_of(bucket: int) -> Decision:
    """The decision for a bucket's graph; made once, as it is what nearly every call gets."""
    return Decision(Route.GRAPH, bucket)
