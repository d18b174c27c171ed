"""Products of few tokens with long weights: whole, and in parts of the weight's rows.

    python benchmarks/products.py                                # needs a GPU
    python benchmarks/products.py --tokens 8 64 --shapes 4096x12288

A product's time is that of one in a CUDA graph of 24, over up to 300 MB of weights that take turns, so that large ones
are not read from the L2; for parts the sum is left out, as it becomes a part of the kernel that reads the result.
"read" is the time to read the weight once at 4.2 TB/s.  This decides the constants of ``passes/split_products``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fullgraph_compile.bench.timing import device_us

# Rows (features out) x columns.  Down projections of Qwen3-8B, Llama-3.1-8B, Qwen2.5-7B, Qwen3-32B, Qwen3-4B, -1.7B and
# -0.6B and SmolLM2-135M; output projections of Qwen3-8B, Qwen2.5-7B, Qwen3-4B, -1.7B and -0.6B; one smaller.
SHAPES = [
    "4096x12288", "4096x14336", "3584x18944", "5120x25600", "2560x9728", "2048x6144", "1024x3072", "576x1536",
    "4096x4096", "3584x3584", "2560x4096", "2048x2048", "1024x2048", "1024x1024",
]  # fmt: skip
TOKENS = [8, 16, 32, 64, 128, 192, 256, 512]
PARTS = [2, 4]
CALLS, BYTES, BANDWIDTH = 24, 300e6, 4.2e12


def time_of(product: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Microseconds of one product."""
    product(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            product(weights[i % len(weights)])
    return device_us(graph.replay, repeats=9) / CALLS


def row(tokens: int, weights: list[Tensor]) -> list[float | None]:
    rows, columns = weights[0].shape
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    times: list[float | None] = [time_of(lambda w: torch.nn.functional.linear(x, w), weights)]
    for parts in PARTS:
        if columns % (parts * 64):
            times.append(None)
            continue
        left = x.view(tokens, parts, -1).transpose(0, 1)

        def product(w: Tensor, left: Tensor = left, parts: int = parts) -> Tensor:
            return torch.bmm(left, w.view(rows, parts, -1).permute(1, 2, 0), out_dtype=torch.float32)

        times.append(time_of(product, weights))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x columns of weights (default: %(default)s)")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    table = Table("weight", "tokens", "whole, us", *(f"{p} parts" for p in PARTS), "read", "best to whole")
    for shape in arguments.shapes:
        rows, columns = map(int, shape.split("x"))
        size = rows * columns * 2
        count = min(max(2, int(-(-BYTES // size))), CALLS)
        weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        for tokens in arguments.tokens:
            whole, *parts = row(tokens, weights)
            assert whole is not None
            cells = ["-" if t is None else f"{t:.2f}" for t in (whole, *parts)]
            best = min((t for t in parts if t is not None), default=whole)
            table.add_row(shape, str(tokens), *cells, f"{size / BANDWIDTH * 1e6:.1f}", f"{best / whole:.2f}")
        del weights
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
