"""Attention time of one layer in a graph, beside the same kernel called eagerly at exact sizes.

    python benchmarks/attention.py                                      # every backend that runs here; needs a GPU
    python benchmarks/attention.py --backends triton --tokens 30 512    # part of it
    python benchmarks/attention.py --random 500                         # random paged batches against the reference

A graph holds ``--sites`` layers, each with keys and values of its own, so that no layer finds the last one's keys in
the cache of the device.  A time is the median of ``--calls`` replays, by CUDA events, over the number of layers.
Replays and exact calls alike are queued behind a long kernel: what their launches cost the host is not in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from fullgraph_compile.attention import create_attention
from fullgraph_compile.attention.base import AttentionBackend
from fullgraph_compile.attention.kv_write import write_site
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.bench.timing import device_us, machine
from fullgraph_compile.cache import PagedKVCache
from fullgraph_compile.graphs import create_recorder
from fullgraph_compile.ladder import capture_lengths
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.staging import ExactBuffers, Poison, StaticBuffers

console = Console(width=150)
DEVICE = torch.device("cuda", 0)


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    random.seed(0)
    console.print(machine())
    results: dict[str, Any] = {"machine": machine()}
    if args.random:
        results["random"] = {name: random_batches(name, args) for name in args.backends}
    else:
        results["times"] = times(args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


def site_of(args: argparse.Namespace, index: int) -> AttentionSite:
    size = args.head_size
    return AttentionSite(
        index, f"attention_{index}", f"layers.{index}", args.heads, args.kv_heads, size, size, size**-0.5,
        dtype=torch.bfloat16,
    )  # fmt: skip


class Rig:
    """Some layers of attention over one bucket, captured, with room for any batch of it."""

    def __init__(
        self, name: str, tokens: int, slots: int, cache: PagedKVCache | None, args: argparse.Namespace
    ) -> None:
        self.args, self.tokens, self.slots, self.cache = args, tokens, min(slots, tokens), cache
        self.sites = [site_of(args, i) for i in range(args.sites)]
        self.backend: AttentionBackend = create_attention(name, self.sites, DEVICE)
        self.max_k = args.context if cache is not None else tokens
        self.buffers = StaticBuffers(DEVICE, [(tokens, self.slots)], self.max_k, cache)
        self.rows = [self._rows(tokens) for _ in self.sites]
        self.recorder = create_recorder("cuda", DEVICE)
        self.outputs: list[Tensor] = []

    def _rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.args.heads, self.args.kv_heads, self.args.kv_heads)
        q, k, v = (torch.randn(tokens, n, self.args.head_size, dtype=torch.bfloat16, device=DEVICE) for n in heads)
        return q, k, v

    def run(self, static: StaticBatch, *, write: bool, tokens: int | None = None) -> list[Tensor]:
        outputs = []
        for site, rows in zip(self.sites, self.rows, strict=True):
            q, k, v = rows if tokens is None else (t[:tokens] for t in rows)
            if write and static.cache is not None:
                write_site(k, v, site, static)
            outputs.append(self.backend.run(q, k, v, None, None, site, static))
        return outputs

    def capture(self, *, write: bool) -> Callable[[], None]:
        lengths = capture_lengths(self.tokens, self.max_k, self.slots)
        assert lengths is not None
        batch = PrefillBatch.for_capture(lengths, self.cache, DEVICE)
        static = self.buffers.stage(batch, self.tokens)
        self.backend.plan(batch, static, self.sites)
        assert self.recorder is not None
        with torch.no_grad(), self.recorder.session():
            for _ in range(2):
                self.run(static, write=write)

            def record() -> None:
                self.outputs = self.run(static, write=write)

            graph = self.recorder.record(record)
        return graph.replay

    def stage(self, batch: PrefillBatch, poison: Poison | None = None) -> StaticBatch:
        static = self.buffers.stage(batch, self.tokens, poison)
        self.backend.plan(batch, static, self.sites)
        return static

    def exact(self, batch: PrefillBatch, *, write: bool = False) -> Callable[[], object]:
        """The same layers at the exact size of a batch, without a graph."""
        static = ExactBuffers(DEVICE).stage(batch)
        self.backend.plan(batch, static, self.sites)
        return lambda: self.run(static, write=write, tokens=batch.tokens)


def cache_of(args: argparse.Namespace, sites: int, requests: int) -> PagedKVCache:
    pages = requests * -(-args.context // args.page_size) + 1
    shapes = [site_of(args, i) for i in range(sites)]
    cache = PagedKVCache(shapes, pages=pages, page_size=args.page_size, dtype=torch.bfloat16, device=DEVICE)
    for pool in (*cache.k, *cache.v):
        pool[1:].normal_()
    return cache


def batch_over(cache: PagedKVCache | None, new: list[int], cached: list[int]) -> PrefillBatch:
    if cache is None:
        return PrefillBatch(new, device=DEVICE)
    return PrefillBatch(new, cached, cache=cache, pages=random_pages(cache, new, cached))


def random_pages(cache: PagedKVCache, new: list[int], cached: list[int]) -> list[list[int]]:
    free = list(range(1, cache.pages))
    random.shuffle(free)
    return [[free.pop() for _ in range(-(-(n + c) // cache.page_size))] for n, c in zip(new, cached, strict=True)]


def spread(tokens: int, requests: int) -> list[int]:
    short, longer = divmod(tokens, requests)
    return [short + 1] * longer + [short] * (requests - longer)


def times(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    jobs = [
        (name, tokens, slots, cached)
        for name in args.backends
        for tokens in args.tokens
        for slots in args.slots
        for cached in args.cached
    ]
    for name, tokens, slots, cached in tqdm(jobs, desc="timing"):
        kind = create_attention(name, [site_of(args, 0)], DEVICE)
        paged = kind.paged and not kind.supports_pages(args.page_size, DEVICE)
        if cached and not paged:
            continue
        cache = cache_of(args, args.sites, min(slots, tokens)) if paged else None
        rig = Rig(name, tokens, slots, cache, args)
        replay = rig.capture(write=False)
        row = {"backend": name, "tokens": tokens, "slots": slots, "cached": cached}
        for live in (1, rig.slots):
            batch = batch_over(cache, spread(tokens, live), [cached] * live)
            rig.stage(batch)
            label = "one" if live == 1 else "all"
            row[f"graph_{label}_us"] = device_us(replay, repeats=args.calls) / args.sites
            row[f"exact_{label}_us"] = device_us(rig.exact(batch), repeats=args.calls) / args.sites
        rig.stage(batch_over(cache, [1], [0]))
        row["empty_us"] = device_us(replay, repeats=args.calls) / args.sites
        if cache is not None:
            rig.stage(batch_over(cache, spread(tokens, 1), [cached]))
            row["with_write_us"] = device_us(rig.capture(write=True), repeats=args.calls) / args.sites
        assert rig.recorder is not None
        rig.recorder.close()
        rows.append(row)
        del rig, cache, replay
        torch.cuda.empty_cache()
    console.print(table(rows))
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="microseconds a layer")
    names = ["backend", "tokens", "slots", "cached"]
    measured = ["graph_one_us", "exact_one_us", "graph_all_us", "exact_all_us", "empty_us", "with_write_us"]
    for name in (*names, *measured):
        shown.add_column(name.removesuffix("_us").replace("_", " "), justify="right")
    for row in rows:
        shown.add_row(*(str(row[n]) for n in names), *(f"{row[m]:.1f}" if m in row else "-" for m in measured))
    return shown


def random_batches(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Random batches with prefixes, all replayed, against each request alone in fp32 on the same bf16 keys."""
    args.sites = 1
    cache = cache_of(args, 1, 16)
    rigs = {tokens: Rig(name, tokens, 16, cache, args) for tokens in (64, 512, 2048)}
    replays = {tokens: rig.capture(write=True) for tokens, rig in rigs.items()}
    errors, noise, worst = [], [], 0.0
    for i in tqdm(range(args.random), desc=name):
        tokens = random.choice(list(rigs))
        rig = rigs[tokens]
        lengths = random_lengths(random.randint(1, tokens), random.randint(1, min(16, tokens)))
        cached = [random.choice([0, random.randint(0, 64), random.randint(0, 4096)]) for _ in lengths]
        pages = random_pages(cache, lengths, cached)
        batch = PrefillBatch(lengths, cached, cache=cache, pages=pages)
        rig.stage(batch, [None, Poison.IMPOSSIBLE, Poison.PLAUSIBLE][i % 3])
        q, k, v = rig.rows[0]
        for t in (q, k, v):
            t.normal_()
            t[batch.tokens :] = float("nan") if i % 2 else 1.0
        replays[tokens]()
        want = alone(q, cache, batch, pages, rig.sites[0])
        got = rig.outputs[0][: batch.tokens].float()
        errors.append(float((got - want).norm() / want.norm()))
        noise.append(float((want.bfloat16().float() - want).norm() / want.norm()))
        worst = max(worst, float((got - want).abs().max()))
        assert not rig.outputs[0][batch.tokens :].any(), "padded rows are zeros"
    found = {
        "batches": args.random, "worst_relative_error": max(errors), "median_relative_error": statistics.median(errors),
        "rounding_to_bf16": statistics.median(noise), "worst_absolute_error": worst,
    }  # fmt: skip
    console.print(name, found)
    for rig in rigs.values():
        assert rig.recorder is not None
        rig.recorder.close()
    return found


def alone(q: Tensor, cache: PagedKVCache, batch: PrefillBatch, pages: list[list[int]], site: AttentionSite) -> Tensor:
    """``[batch.tokens, heads, head_size]`` in fp32: torch's own attention, one request after the other."""
    rows, start = [], 0
    for new, length, own in zip(batch.new_tokens, batch.lengths, pages, strict=True):
        at = torch.tensor(own, device=DEVICE)
        k, v = (pool[site.index][at].flatten(0, 1)[:length].float().transpose(0, 1) for pool in (cache.k, cache.v))
        position = torch.arange(length - new, length, device=DEVICE)
        seen = torch.arange(length, device=DEVICE) <= position[:, None]
        query = q[start : start + new].float().transpose(0, 1)
        found = F.scaled_dot_product_attention(
            query[None], k[None], v[None], attn_mask=seen, scale=site.scale, enable_gqa=True
        )
        rows.append(found[0].transpose(0, 1))
        start += new
    return torch.cat(rows)


def random_lengths(tokens: int, requests: int) -> list[int]:
    requests = min(requests, tokens)
    cuts = sorted(random.sample(range(1, tokens), requests - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["triton", "varlen"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[30, 128, 512, 2048])
    parser.add_argument("--slots", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--cached", nargs="+", type=int, default=[0, 4096])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=6144, help="longest request, which graphs are bound to")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--random", type=int, default=0, help="compare so many random batches instead of timing")
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
