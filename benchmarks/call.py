"""Where the time of one call is: until its graph is launched, the graph alone, and all of it with its result ready.

    python benchmarks/call.py qwen3-0.6b --tokens 30          # random bf16 weights, needs a GPU
    python benchmarks/call.py smollm2-135m --layers 2 --device cpu --calls 20      # tries this script, no more

Two kinds of call: token ids alone, as the model itself takes them, and the same in a ``PrefillBatch`` that was made
before.  The device is idle when a call begins; inputs rotate.  Medians in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.bench.models import PRESETS, build
from fullgraph_compile.bench.routes import Ours, random_ids
from fullgraph_compile.bench.timing import machine, median_ms

sys.path.insert(0, str(Path(__file__).parent))
from host import until_launch

Call = Callable[[Tensor], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[30])
    parser.add_argument("--layers", type=int, help="only the first so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=300)
    parser.set_defaults(sweep=0)  # as ``host`` takes it
    args = parser.parse_args()
    device = torch.device(args.device)
    cpu = device.type == "cpu"
    body = build(args.preset, device, torch.float32 if cpu else torch.bfloat16, layers=args.layers)
    options = {"graphs": "tape", "compiler": "eager"} if cpu else {}
    route = Ours(body, device, {"max_tokens": max(args.tokens), **options})
    route.start()
    table = Table("tokens", "call", "us", "until it returns", "until the launch", title=machine())
    for tokens in args.tokens:
        inputs = random_ids(body.config.vocab_size, tokens, device)
        for name, call in calls(route, tokens, inputs[0]).items():
            table.add_row(str(tokens), name, *(f"{t:.0f}" for t in timed(args, call, inputs)))
    for column in table.columns[2:]:
        column.justify = "right"
    Console(width=110).print(table)


def calls(route: Ours, tokens: int, ids: Tensor) -> dict[str, Call]:
    """The graph alone, and both kinds of call."""
    batch = fgc.PrefillBatch([tokens], device=route.device)

    def in_batch(ids: Tensor) -> Any:
        with batch:
            return route(ids)

    bucket = route.decision(tokens).bucket
    assert bucket is not None
    route(ids)
    launch = route.runner.relaunch(bucket)
    # First, as the graph is launched on what was staged last.
    return {"the graph alone": lambda ids: launch(), "token ids": route, "in a batch": in_batch}


def timed(args: argparse.Namespace, call: Call, inputs: Sequence[Tensor]) -> list[float]:
    """A call until its result is ready, until it returns, and until its graph is launched."""
    took = partial(median_ms, call, inputs, torch.device(args.device), repeats=args.calls, warm=30)
    rotating = cycle(inputs)
    launched = until_launch(args, lambda: call(next(rotating)))
    return [took() * 1e3, took(wait=False) * 1e3, statistics.median(launched)]


if __name__ == "__main__":
    main()
