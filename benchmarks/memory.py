"""Where the device memory of graphs goes: by stage, by graph, and by how the pool is laid out.

    python benchmarks/memory.py                                  # Qwen3-8B shapes, ladder to 2048, needs a GPU
    python benchmarks/memory.py --arena 0 16 32 64 --json memory.json

The driver's count (``mem_get_info``) is split into what torch's allocator holds, weights apart, and what lies outside
of it: instantiated graphs, loaded kernels, the driver's own.  ``--arena`` captures again with one piece of memory set
free in the pool before the first capture: the most that the largest bucket holds at once, and so many MiB more; graphs
then cut theirs from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fullgraph_compile as fgc
from fullgraph_compile.bench.models import PRESETS, build
from fullgraph_compile.bench.routes import Ours
from fullgraph_compile.bench.timing import machine
from fullgraph_compile.capture import CaptureSet
from fullgraph_compile.forecast import NODE_BYTES, peak_bytes
from fullgraph_compile.graphs.cuda import CudaGraph, CudaGraphRecorder

MIB = 2**20


class Watch:
    """Counts of the device's memory, and what each capture adds to them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stages: list[tuple[str, int, int, int]] = []
        self.graphs: list[dict[str, float]] = []
        self.arena = 0
        self._record = CudaGraphRecorder.record
        self._capture = CaptureSet.capture

    def note(self, stage: str) -> None:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        reserved, allocated = torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
        self.stages.append((stage, total - free, reserved, allocated))

    def begin(self) -> None:
        watch = self

        def capture(graphs: CaptureSet, *args: Any, **kwargs: Any) -> dict[int, Exception]:
            watch.note("before warm-ups")
            watch.graphs.clear()
            return watch._capture(graphs, *args, **kwargs)

        def record(recorder: CudaGraphRecorder, run: Callable[[], None]) -> CudaGraph:
            if not watch.graphs:
                torch.cuda.empty_cache()
                watch.note("before the first graph")
            before = watch.counts()
            first = not watch.graphs

            def with_arena() -> None:
                if first and watch.arena:
                    torch.empty(watch.arena, dtype=torch.uint8, device=watch.device)  # set free at once
                run()

            graph = watch._record(recorder, with_arena)
            used, reserved = (now - then for now, then in zip(watch.counts(), before, strict=True))
            watch.graphs.append({"nodes": graph.nodes or 0, "reserved": reserved, "outside": used - reserved})
            return graph

        CaptureSet.capture = capture  # type: ignore[method-assign]
        CudaGraphRecorder.record = record  # type: ignore[method-assign,assignment]

    def counts(self) -> tuple[int, int]:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free, torch.cuda.memory_reserved(self.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=tuple(PRESETS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--arena", type=int, nargs="*", default=[], metavar="MIB")
    parser.add_argument("--json")
    args = parser.parse_args()
    console = Console(width=110)
    if not torch.cuda.is_available():
        parser.error("there is no GPU, so there is no device memory to count")
    device = torch.device("cuda", torch.cuda.current_device())
    body = build(args.model, device, torch.bfloat16, layers=args.layers)
    torch.cuda.empty_cache()
    watch = Watch(device)
    watch.note("weights")
    watch.begin()
    ours = Ours(body, device, {"max_tokens": args.max_tokens})
    ours.start()
    torch.cuda.empty_cache()
    watch.note("ready")
    stages, graphs, report = [*watch.stages], [*watch.graphs], fgc.report(body)
    found = arenas(watch, ours, args.arena)
    show(console, stages, graphs, found, report)
    if args.json:
        results = {"machine": machine(), "model": args.model, "stages": stages, "graphs": graphs, "arenas": found}
        Path(args.json).write_text(json.dumps(results, indent=1))


def arenas(watch: Watch, ours: Ours, extra: list[int]) -> dict[int, float]:
    """MiB that the pool reserves, by how much larger than the largest bucket's peak its first piece is."""
    if not extra:
        return {}
    ids = torch.zeros(1, 8, dtype=torch.long, device=watch.device)
    peak = peak_of_largest(ours, ids)
    found = {-1: sum(g["reserved"] for g in watch.graphs) / MIB}
    for more in extra:
        fgc.release(ours.body)
        watch.arena = peak + more * MIB
        ours(ids)
        found[more] = sum(g["reserved"] for g in watch.graphs) / MIB
    print(f"peak of the largest bucket: {peak / MIB:.0f} MiB")
    return found


def peak_of_largest(ours: Ours, ids: torch.Tensor) -> int:
    """Bytes of intermediate values that the largest bucket holds at once."""
    graphs = ours.runner._sets[0]
    with torch.inference_mode(False), torch.no_grad():
        run = graphs.run_of(graphs.buckets[max(graphs.buckets)], ours.arguments(ids))
        run()
        return peak_bytes(run, ours.device)


def show(
    console: Console,
    stages: list[tuple[str, int, int, int]],
    graphs: list[dict[str, float]],
    found: dict[int, float],
    report: fgc.Report,
) -> None:
    table = Table("stage", "driver, MiB", "torch reserved", "torch allocated", "outside torch")
    _, used0, reserved0, allocated0 = stages[0]
    for stage, used, reserved, allocated in stages:
        values = (used - used0, reserved - reserved0, allocated - allocated0, used - used0 - reserved + reserved0)
        table.add_row(stage, *(f"{v / MIB:.0f}" for v in values))
    console.print(table)
    pool, outside = sum(g["reserved"] for g in graphs), sum(g["outside"] for g in graphs)
    nodes = sum(g["nodes"] for g in graphs)
    console.print(
        f"{len(graphs)} graphs, {nodes} nodes: pool {pool / MIB:.0f} MiB, outside torch {outside / MIB:.0f} MiB = "
        f"{outside / max(1, nodes):.0f} bytes a node (forecast with {NODE_BYTES}); first graph "
        f"{graphs[0]['outside'] / MIB:.0f}, last {graphs[-1]['outside'] / MIB:.1f}"
    )
    console.print(f"report: {report.graph_bytes / MIB:.0f} MiB, forecast {report.forecast_bytes / MIB:.0f}")
    for more, pool_mib in found.items():
        console.print(f"pool with {'no arena' if more < 0 else f'arena of peak + {more} MiB'}: {pool_mib:.0f} MiB")


if __name__ == "__main__":
    main()
