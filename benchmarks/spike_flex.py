"""Spike: flex_attention in a graph, its mask updated in place, next to the kernel of our own.

    python benchmarks/spike_flex.py

One layer, packed keys without a cache.  The block mask of a bucket is made once; before a replay the request of each
row and the mask's block lists are overwritten where they lie, from a block mask that is made anew for the batch.  A
time is a graph of ``--sites`` layers over their number, median, queued behind a long kernel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from attention import Rig, batch_over, spread, time_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fullgraph_compile.bench.timing import machine

console = Console(width=130)
DEVICE = torch.device("cuda", 0)
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class Flex:
    """Some layers of flex_attention over one bucket, captured."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.tokens = rig, rig.tokens
        self.request = torch.zeros(self.tokens, dtype=torch.int32, device=DEVICE)
        self.attend: Any = torch.compile(flex_attention, dynamic=False)
        self.make: Any = torch.compile(create_block_mask, dynamic=False)
        self.stage(spread(self.tokens, 1))
        self.mask = self.block_mask()

    def block_mask(self) -> BlockMask:
        request = self.request

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (request[q] == request[k]) & (q >= k)

        return self.make(mask, None, None, self.tokens, self.tokens, device=DEVICE)

    def stage(self, lengths: list[int]) -> None:
        rows = [i for i, n in enumerate(lengths) for _ in range(n)]
        rows += [-1 - i for i in range(self.tokens - len(rows))]  # a padded row is a request of its own
        self.request.copy_(torch.tensor(rows, dtype=torch.int32))

    def update(self, lengths: list[int]) -> None:
        self.stage(lengths)
        fresh = self.block_mask()
        for name in LISTS:
            getattr(self.mask, name).copy_(getattr(fresh, name))

    def run(self) -> list[Tensor]:
        heads = [[t.transpose(0, 1)[None] for t in rows] for rows in self.rig.rows]
        return [self.attend(q, k, v, block_mask=self.mask, enable_gqa=True)[0].transpose(0, 1) for q, k, v in heads]

    def capture(self) -> Any:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.outputs = self.run()
        return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[32, 128, 512, 2048])
    for name, default in (("heads", 32), ("kv-heads", 8), ("head-size", 128), ("sites", 8), ("calls", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    torch.manual_seed(0)
    console.print(machine())
    table = Table("tokens", "flex, one", "triton, one", "flex, 16", "triton, 16", "update, us", "difference")
    for tokens in args.tokens:
        rig = Rig("triton", tokens, 16, None, args)
        ours, flex = rig.capture(write=False), Flex(rig)
        graph = flex.capture()
        row, worst = [], 0.0
        for requests in (1, min(16, tokens)):
            lengths = spread(tokens, requests)
            rig.stage(batch_over(None, lengths, [0] * requests))
            flex.update(lengths)
            row += [time_of(call, args.sites, args.calls) for call in (graph.replay, ours)]
            pairs = zip(flex.outputs, rig.outputs, strict=True)
            worst = max(worst, *(float((a.float() - b.float()).abs().max()) for a, b in pairs))
        updates = []
        for _ in range(20):
            start = time.perf_counter()
            flex.update(lengths)
            torch.cuda.synchronize()
            updates.append((time.perf_counter() - start) * 1e6)
        table.add_row(str(tokens), *(f"{t:.1f}" for t in row), f"{statistics.median(updates):.0f}", f"{worst:.1e}")
        assert rig.recorder is not None
        rig.recorder.close()
    console.print(table)


if __name__ == "__main__":
    main()
