"""Which way each token bucket runs: timed once, after the capture, and decided by the times alone.

Three ways: the graph of the compiled body; a graph of the body as SGLang has it; no graph.  A call is a whole forward
of SGLang's model runner, staging and tail with it, on a batch that fills the bucket.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullgraph_compile.integrations.sglang.attention import replaced
from fullgraph_compile.integrations.sglang.host_plan import HostPlans, plans_of
from fullgraph_compile.integrations.sglang.metadata import prefill_attention
from fullgraph_compile.report import Report

# Who plans attention: the plugin, or SGLang.
HOST, READING = "the host", "SGLang"
COMPILED, SGLANG, EAGER = WAYS = "compiled", "SGLang's", "eager"
# The graph of the compiled body is kept unless it takes more than this many times as long as the best.
MARGIN = 1.02
# Calls that are timed for each way: fewer of long ones, as less of these is noise.
MOST_ROUNDS, LEAST_ROUNDS, ENOUGH_MS = 9, 3, 100.0
# What takes this many times as long as the best at the first call is not called again.
HOPELESS = 1.5
# Buckets that are timed; each of the others goes the way of the nearest.
MOST_TIMED = 16
# Batches with other tokens, by turns.
BATCHES = 3


@dataclass(frozen=True)
class BucketTimes:
    """What a bucket's ways were measured at.

    Attributes:
        ms: median milliseconds of a call, by way.
        plan_ms: the same of the compiled body's graph, by who plans its attention; empty where that is SGLang anyhow.
    """

    bucket: int
    ms: Mapping[str, float]
    plan_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def way(self) -> str:
        best = min(WAYS, key=lambda way: self.ms.get(way, float("inf")))
        return best if self.ms[COMPILED] > MARGIN * self.ms[best] else COMPILED

    def __str__(self) -> str:
        times = ", ".join(f"{way} {self.ms[way]:.3f}" for way in WAYS if way in self.ms)
        plans = ", ".join(f"{who} {ms:.3f}" for who, ms in self.plan_ms.items())
        return f"bucket {self.bucket}: {self.way} ({times} ms{'; planned by ' + plans if plans else ''})"

    @property
    def left_to_sglang(self) -> bool:
        """Whether SGLang's own plan is faster by more than the margin."""
        return bool(self.plan_ms) and self.plan_ms[HOST] > MARGIN * self.plan_ms[READING]


def unmeasurable(runner: Any) -> str | None:
    """Why the ways of a runner's buckets are not timed; None = they can be."""
    if torch.device(runner.device).type == "cpu":
        return "on a CPU there are no graphs"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "ranks would have to agree"
    if getattr(runner, "_capture_chunked_prefix", False):
        return "cached prefixes have graphs of their own"
    if getattr(runner, "_capture_lora", False):
        return "adapters are part of the graphs"
    if getattr(getattr(runner.backend, "_memory_saver_adapter", None), "enabled", False):
        return "the memory saver keeps what was captured"
    return None


def measure(model_runner: Any, eager_runner: Any, runner: Any) -> tuple[tuple[BucketTimes, ...], Any]:
    """Capture the body as SGLang has it once more, and time each bucket's ways.

    Args:
        runner: SGLang's prefill runner, which has captured the compiled body.

    Returns:
        the times, ascending by bucket, of all buckets or of some that are spread over them; and the backend that holds
        SGLang's own graphs.
    """
    ours = runner.backend
    theirs = _recorded(runner)
    plans, synchronize = plans_of(prefill_attention(model_runner.attn_backend)), runner.device_module.synchronize
    times = []
    with _as_serving(model_runner, eager_runner, runner), torch.no_grad():
        for bucket in spread(sorted(int(b) for b in runner.capture_num_tokens)):
            batches = [_batch(runner, bucket, turn) for turn in range(BATCHES)]
            calls = {
                way: _call(model_runner, runner, backend)
                for way, backend in ((COMPILED, ours), (SGLANG, theirs), (EAGER, None))
            }
            plan_ms = _choose_plan(bucket, calls[COMPILED], batches, plans, synchronize)
            times.append(BucketTimes(bucket, _times(bucket, calls, batches, synchronize), plan_ms))
    return tuple(times), theirs


def settle(backend: Any, theirs: Any, times: Sequence[BucketTimes], report: Report) -> None:
    """Give each bucket its way, and let go of all other graphs."""
    for key in list(backend._graphs):
        nearest = _nearest(times, key.size)
        if nearest.way == SGLANG:
            backend._graphs[key], backend._outputs[key] = theirs._graphs[key], theirs._outputs.get(key)
            backend.sglangs.add(int(key.size))
        elif nearest.way == EAGER:
            del backend._graphs[key]
            backend._outputs.pop(key, None)
            backend.eager[int(key.size)] = str(nearest)
    theirs._graphs, theirs._outputs = {}, {}
    own = backend.session.own
    if own.backend is not None and not backend.sglangs:
        own.let_go()
    plans = plans_of(prefill_attention(backend.runner.model_runner.attn_backend))
    if plans is not None:
        plans.left = {int(k.size) for k in backend._graphs if _nearest(times, k.size).left_to_sglang}
    report.buckets = tuple(sorted({int(key.size) for key in backend._graphs}))
    report.routes = tuple(str(t) for t in times)


def free_memory() -> int:
    """Bytes of the device that nobody holds; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def spread(buckets: Sequence[int], most: int = MOST_TIMED) -> list[int]:
    """At most ``most`` of an ascending ladder, the first and the last among them, at even ratios."""
    if len(buckets) <= most:
        return list(buckets)
    step = (buckets[-1] / buckets[0]) ** (1 / (most - 1))
    wanted = [buckets[0] * step**i for i in range(most)]
    return sorted({min(buckets, key=lambda b: abs(math.log(b / w))) for w in wanted})


Call = Callable[[Any], Any]


def _nearest(times: Sequence[BucketTimes], bucket: int) -> BucketTimes:
    return min(times, key=lambda t: abs(math.log(t.bucket / bucket)))


def timed(way: str, bucket: int, call: Call, batch: Any, synchronize: Callable[[], None]) -> float:
    """Milliseconds of one call, the device idle before and after it."""
    synchronize()
    start = time.perf_counter()
    call(batch)
    synchronize()
    return (time.perf_counter() - start) * 1e3


def _times(
    bucket: int, calls: Mapping[str, Call], batches: Sequence[Any], synchronize: Callable[[], None]
) -> dict[str, float]:
    """The median of each way; they take turns, so that a change of clocks touches all."""
    for call in calls.values():
        # What is made at a way's first call.
        call(batches[0])
    found = {way: [timed(way, bucket, call, batches[0], synchronize)] for way, call in calls.items()}
    best = min(times[0] for times in found.values())
    hopeful = {way: call for way, call in calls.items() if found[way][0] <= HOPELESS * best or way == COMPILED}
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(ENOUGH_MS / max(best, 1e-3))))
    for turn in range(1, rounds):
        for way, call in hopeful.items():
            found[way].append(timed(way, bucket, call, batches[turn % len(batches)], synchronize))
    return {way: statistics.median(times) for way, times in found.items()}


def _choose_plan(
    bucket: int, call: Call, batches: Sequence[Any], plans: HostPlans | None, synchronize: Callable[[], None]
) -> dict[str, float]:
    """Leave a bucket's plans to SGLang where these are faster: the times by who plans."""
    if plans is None:
        return {}

    def reading(batch: Any) -> Any:
        with replaced(plans, "left", {*plans.left, bucket}):
            return call(batch)

    times = _times(bucket, {HOST: call, READING: reading}, batches, synchronize)
    if BucketTimes(bucket, {COMPILED: 0.0}, times).left_to_sglang:
        plans.left.add(bucket)
    return times


def _recorded(runner: Any) -> Any:
    """A backend of SGLang's own, with graphs of the body as SGLang has it, in the memory of those that there are."""
    theirs = copy.copy(runner.backend)
    theirs.__class__ = type(runner.backend).__bases__[0]
    theirs._graphs, theirs._outputs = {}, {}
    with replaced(runner, "backend", theirs):
        runner.capture()
    return theirs


@contextlib.contextmanager
def _as_serving(model_runner: Any, eager_runner: Any, runner: Any) -> Iterator[None]:
    """The model runner as it will be: it gets its runners only when the capture is over."""
    found = {"eager_runner": eager_runner, "prefill_cuda_graph_runner": runner, "decode_cuda_graph_runner": None}
    with contextlib.ExitStack() as stack:
        for name, value in found.items():
            stack.enter_context(replaced(model_runner, name, value))
        yield


def _call(model_runner: Any, runner: Any, backend: Any) -> Call:
    """A forward by one way; no backend = no graph."""

    def call(batch: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(runner, "can_run_graph", lambda batch: backend is not None))
            if backend is not None:
                stack.enter_context(replaced(runner, "backend", backend))
            return model_runner.forward(copy.copy(batch))

    return call


# Of a batch: what has an entry for each request.
_TENSORS = (
    "req_pool_indices", "seq_lens", "orig_seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_prefix_lens",
    "extend_start_loc",
)  # fmt: skip
_LISTS = ("extend_prefix_lens_cpu", "extend_seq_lens_cpu", "extend_logprob_start_lens_cpu")


def _batch(runner: Any, bucket: int, turn: int) -> Any:
    """A batch of fresh requests that fills a bucket: SGLang's own for the capture, without its empty requests and on
    tensors of its own.  Keys go where padded rows' go, as nothing has a place in the cache yet."""
    captured, _ = runner.capture_prepare(bucket)
    batch = copy.copy(captured)
    lengths = [int(n) for n in captured.extend_seq_lens_cpu if n]
    requests = batch.batch_size = len(lengths)
    for name in _TENSORS:
        setattr(batch, name, getattr(captured, name)[:requests].clone())
    for name in _LISTS:
        setattr(batch, name, list(getattr(captured, name)[:requests]))
    generator = torch.Generator().manual_seed(turn)
    vocabulary = int(runner.model_runner.model_config.vocab_size)
    ids, places = captured.input_ids, captured.positions
    batch.input_ids = torch.randint(vocabulary, ids.shape, generator=generator).to(ids.device, ids.dtype)
    batch.positions = torch.cat([torch.arange(n) for n in lengths]).to(places.device, places.dtype)
    batch.out_cache_loc = torch.zeros_like(captured.out_cache_loc)
    batch.next_token_logits_buffer = None
    return batch
