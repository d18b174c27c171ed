"""Where the time of one call is: until its graph is launched, the graph alone, and all of it with its result ready.

    python benchmarks/call.py qwen3-0.6b --tokens 30          # random bf16 weights, needs a GPU
    python benchmarks/call.py smollm2-135m --layers 2 --device cpu --calls 20      # tries this script, no more

Two kinds of call: token ids alone, as the model itself takes them, and the same in a ``PrefillBatch`` that was made
before.  The device is idle when a call begins; inputs rotate.  Medians, and the least, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fullgraph_compile as fgc
from fullgraph_compile.bench.models import PRESETS, build
from fullgraph_compile.bench.routes import Ours, random_ids
from fullgraph_compile.bench.timing import machine, synchronize
from fullgraph_compile.graphs.cuda import CudaGraph
from fullgraph_compile.graphs.tape import Tape

Call = Callable[[int], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[30])
    parser.add_argument("--layers", type=int, help="only the first so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=300)
    args = parser.parse_args()
    device = torch.device(args.device)
    cpu = device.type == "cpu"
    body = build(args.preset, device, torch.float32 if cpu else torch.bfloat16, layers=args.layers)
    options = {"graphs": "tape", "compiler": "eager"} if cpu else {}
    route = Ours(body, device, {"max_tokens": max(args.tokens), **options})
    route.start()
    table = Table("tokens", "call", "us", "least", "until it returns", "until the launch", title=machine())
    for tokens in args.tokens:
        for name, call in calls(route, tokens).items():
            row = timed(device, call, args.calls)
            table.add_row(str(tokens), name, *(f"{t:.0f}" for t in row))
    for column in table.columns[2:]:
        column.justify = "right"
    Console(width=110).print(table)


def calls(route: Ours, tokens: int) -> dict[str, Call]:
    """The graph alone, and both kinds of call."""
    ids = random_ids(route.body.config.vocab_size, tokens, route.device)
    batch = fgc.PrefillBatch([tokens], device=route.device)

    def plain(i: int) -> Any:
        return route(ids[i % len(ids)])

    def in_batch(i: int) -> Any:
        with batch:
            return plain(i)

    for i in range(30):
        plain(i), in_batch(i)
    bucket = route.decision(tokens).bucket
    assert bucket is not None
    graph = route.runner.buckets[bucket].graph
    assert graph is not None
    return {"the graph alone": lambda i: graph.replay(), "token ids": plain, "in a batch": in_batch}


def timed(device: torch.device, call: Call, count: int) -> Sequence[float]:
    """Median and least of a call until its result is ready, until it returns, and until its graph is launched."""
    whole, returned, launched = [], [], []
    for i in range(count):
        synchronize(device)
        start = time.perf_counter()
        call(i)
        end = time.perf_counter()
        synchronize(device)
        whole.append((time.perf_counter() - start) * 1e6)
        returned.append((end - start) * 1e6)
    # Apart, as reading the clock inside of a call takes its time too.
    kind: Any = Tape if device.type == "cpu" else CudaGraph
    replay, at = kind.replay, [0.0]

    def noted(graph: Any) -> None:
        at[0] = time.perf_counter()
        replay(graph)

    kind.replay = noted
    try:
        for i in range(count):
            synchronize(device)
            start = time.perf_counter()
            call(i)
            launched.append((at[0] - start) * 1e6)
    finally:
        kind.replay = replay
    return statistics.median(whole), min(whole), statistics.median(returned), statistics.median(launched)


if __name__ == "__main__":
    main()
