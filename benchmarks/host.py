"""Host time of one call of a compiled body, by phase: what a call costs before and after the launch of its graph.

    python benchmarks/host.py                        # 36 small Qwen3 layers, 16 requests; on a GPU the varlen backend
    python benchmarks/host.py --device cpu --calls 300 --fresh    # a batch of its own for each call
    python benchmarks/host.py --device cpu --padded 8    # a BERT with a pooler, 8 sentences and their mask

The device is idle when a call begins, and the call is over when it returns: the result is not waited for.  On a CPU
the graph is replaced by nothing, so that only the host's own work is left.  Each phase is without those within it.
Other work runs between the calls of a user: ``--sweep 64`` writes so many MB there, which leaves the caches cold.
Reading the clock adds some 0.3 us to a phase, so the call is also timed with no clock in it.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fullgraph_compile as fgc
from fullgraph_compile.binding import Binder
from fullgraph_compile.capture import CaptureSet
from fullgraph_compile.compiled_body import compiled_body
from fullgraph_compile.graphs.cuda import CudaGraph
from fullgraph_compile.graphs.tape import Tape
from fullgraph_compile.integrations.hf_back import Back
from fullgraph_compile.runner import BodyRunner
from fullgraph_compile.staging import StaticBuffers
from fullgraph_compile.tracing import Tracer
from fullgraph_compile.variant import Variant
from fullgraph_compile.watching import Watch

# Phase, and the method that it is.
PHASES: list[tuple[str, type, str]] = [
    ("arguments", Binder, "bind"),
    ("dispatch", BodyRunner, "decide"),
    ("staging: metadata", StaticBuffers, "stage"),
    ("staging: inputs, the way to the launch", CaptureSet, "replay"),
    ("launch", CudaGraph, "replay"),
    ("launch", Tape, "replay"),
    ("addresses of weights", CaptureSet, "weights_moved"),
    ("changes watched", Watch, "same"),
    ("guards", Variant, "still_holds"),
    ("guards, the modes around them", Tracer, "stands"),
    ("guards, in full", Tracer, "holds"),
    ("copies of results", BodyRunner, "owned"),
    ("the way back to a padded result", Back, "__call__"),
    *(("the caller's inference mode", torch.inference_mode, name) for name in ("__init__", "__enter__", "__exit__")),
]
REST = "rest"


class Clock:
    """Time in each phase, without the phases within it."""

    def __init__(self) -> None:
        self.times: dict[str, float] = defaultdict(float)
        self._within: list[float] = []

    def timed(self, phase: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            start = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.times[phase] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        return call


def main() -> None:
    args = arguments()
    body, call = build_padded(args) if args.padded else build(args)
    for _ in range(20):
        call()
    launch = 0.0
    if args.device == "cpu":
        Tape.replay = lambda self: None  # type: ignore[method-assign]
    else:
        launch = min(timed(args, launch_of(body)))
    until, whole = until_launch(args, call), timed(args, call)
    phases = by_phase(args, call)
    table = Table("phase", "median, us", "least, us", title=machine(args))
    for name, times in phases.items():
        table.add_row(name, f"{statistics.median(times):.1f}", f"{min(times):.1f}")
    table.add_section()
    table.add_row("the call, no clock in it", f"{statistics.median(whole):.1f}", f"{min(whole):.1f}")
    table.add_row("the call until its launch", f"{statistics.median(until):.1f}", f"{min(until):.1f}")
    table.add_row("beyond the launch", f"{statistics.median(whole) - launch:.1f}", f"{min(whole) - launch:.1f}")
    for column in table.columns[1:]:
        column.justify = "right"
    Console(width=100).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size on a GPU; 32 on a CPU")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2, help="new tokens of each request")
    parser.add_argument("--fresh", action="store_true", help="make the batch anew for each call")
    parser.add_argument("--sweep", type=int, default=0, metavar="MB", help="written between calls, for cold caches")
    parser.add_argument("--padded", type=int, default=0, help="sentences of a padded call; 0 = a packed call")
    parser.add_argument("--attention", help="default: varlen on a GPU, reference on a CPU")
    parser.add_argument("--calls", type=int, default=1000)
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[nn.Module, Callable[[], Any]]:
    from transformers import Qwen3Config, Qwen3Model

    cpu = args.device == "cpu"
    hidden = 32 if cpu else args.hidden
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=args.layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, vocab_size=1000, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3Model(config).to(args.device, torch.float32 if cpu else torch.bfloat16).eval()
    body = fgc.compile(
        model,
        max_tokens=max(64, args.requests * args.tokens),
        attention=args.attention or ("reference" if cpu else "varlen"),
        graphs="tape" if cpu else "cuda",
        compiler="eager" if cpu else "inductor",
        strict=True,
    )
    lengths = [args.tokens] * args.requests
    batch = fgc.PrefillBatch(lengths, device=args.device)
    ids = torch.randint(1, 1000, (1, batch.tokens), device=args.device)
    positions = batch.position_ids[None]

    def again() -> Any:
        with torch.inference_mode(), batch:
            return body(input_ids=ids, position_ids=positions, use_cache=False)

    def fresh() -> Any:
        batch = fgc.PrefillBatch(lengths, device=args.device)
        with torch.inference_mode(), batch:
            return body(input_ids=ids, use_cache=False)

    return body, fresh if args.fresh else again


def build_padded(args: argparse.Namespace) -> tuple[nn.Module, Callable[[], Any]]:
    """Sentences of 10, 11, 12 ... tokens."""
    from transformers import BertConfig, BertModel

    cpu = args.device == "cpu"
    hidden = 32 if cpu else args.hidden
    config = BertConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=args.layers, num_attention_heads=4,
        vocab_size=1000,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertModel(config).to(args.device, torch.float32 if cpu else torch.bfloat16).eval()
    columns = 9 + args.padded
    fgc.compile(
        model,
        max_tokens=max(64, args.padded * columns),
        request_slots=args.padded,
        attention=args.attention or ("reference" if cpu else "varlen"),
        graphs="tape" if cpu else "cuda",
        compiler="eager" if cpu else "inductor",
        strict=True,
    )
    ids = torch.randint(1, 1000, (args.padded, columns), device=args.device)
    mask = (torch.arange(columns) < torch.arange(10, 10 + args.padded)[:, None]).long().to(args.device)
    types = torch.zeros_like(ids)

    def call() -> Any:
        with torch.inference_mode():
            return model(input_ids=ids, attention_mask=mask, token_type_ids=types)

    return model, call


def launch_of(body: nn.Module) -> Callable[[], None]:
    """Launches the graph of the bucket that was replayed."""
    compiled = compiled_body(body)
    assert compiled is not None
    (used,) = fgc.report(body).replays
    return compiled.graphs()[0].runner.relaunch(used)


def timed(args: argparse.Namespace, call: Callable[[], Any]) -> list[float]:
    """Microseconds of each of many calls."""
    times = []
    for _ in range(args.calls):
        synchronize(args)
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    synchronize(args)
    return times


def until_launch(args: argparse.Namespace, call: Callable[[], Any]) -> list[float]:
    """Microseconds from the beginning of each of many calls until its graph is launched."""
    kind: Any = Tape if args.device == "cpu" else CudaGraph
    replay = kind.replay
    begun: list[float] = []
    launched: list[float] = []

    def marked() -> None:
        begun.append(time.perf_counter())
        call()

    def noted(graph: Any) -> None:
        launched.append(time.perf_counter())
        replay(graph)

    kind.replay = noted
    try:
        timed(args, marked)
    finally:
        kind.replay = replay
    return [(end - start) * 1e6 for start, end in zip(begun, launched, strict=True)]


def by_phase(args: argparse.Namespace, call: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds in each phase of each of many calls."""
    clock = Clock()
    plain = [(owner, name, vars(owner)[name]) for _, owner, name in PHASES]
    for phase, owner, name in PHASES:
        setattr(owner, name, clock.timed(phase, vars(owner)[name]))
    found: dict[str, list[float]] = defaultdict(list)
    whole = clock.timed(REST, call)
    try:
        for _ in range(args.calls):
            synchronize(args)
            clock.times.clear()
            whole()
            for phase, took in clock.times.items():
                found[phase].append(took * 1e6)
    finally:
        for owner, name, method in plain:
            setattr(owner, name, method)
    order = [*dict.fromkeys(phase for phase, _, _ in PHASES), REST]
    return {phase: found[phase] for phase in order if phase in found}


def synchronize(args: argparse.Namespace) -> None:
    """Before each call: the device idle, and the caches as they are, or cold."""
    if args.device != "cpu":
        torch.cuda.synchronize()
    if args.sweep:
        block = swept(args.sweep)
        block += 1


@functools.cache
def swept(megabytes: int) -> np.ndarray:
    return np.zeros(megabytes << 17)


def machine(args: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if args.device != "cpu" else platform.processor() or platform.machine()
    return (
        f"{args.layers} layers, {args.padded or args.requests} requests; {device}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
