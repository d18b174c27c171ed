"""Correctness, start-up, memory and call time of one compiled body, next to transformers eager.

    python benchmarks/prefill.py                       # Qwen3-8B shapes, random bf16 weights, needs ~60 GB of GPU
    python benchmarks/prefill.py --layers 4 --batches 20
    python benchmarks/prefill.py --device cpu --layers 2 --hidden 64 --batches 5 --graphs tape --compiler aot_eager

Errors are the relative L2 norm over real rows against the same weights in fp32.  A time is the median wall time of
one call, from the user's call, staging included, until its result is ready, over rotating inputs.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile.bench.models import build as build_preset
from fullgraph_compile.bench.timing import free_bytes, machine, median_ms, synchronize
from fullgraph_compile.registry import compiled_for
from fullgraph_compile.staging import Poison

console = Console(width=110)


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    random.seed(0)
    console.print(machine())
    model = build(args)
    results: dict[str, Any] = {"machine": machine(), "layers": args.layers, "hidden": args.hidden}

    console.rule("start-up")
    reference = copy.deepcopy(model).float() if args.errors else None
    eager = copy.deepcopy(model)
    free, start = free_bytes(torch.device(args.device)), time.perf_counter()
    body = fgc.compile(
        model,
        max_tokens=args.max_tokens,
        attention=args.attention,
        compiler=args.compiler,
        graphs=args.graphs,
        fuse_projections=args.fuse,
    )
    fgc.warmup(body)
    synchronize(torch.device(args.device))
    results["ready_s"] = time.perf_counter() - start
    results["memory_mb"] = (free - free_bytes(torch.device(args.device))) / 2**20
    console.print(
        f"first call to ready: {results['ready_s']:.1f} s; memory by mem_get_info {results['memory_mb']:.0f} MiB"
    )
    console.print(str(fgc.report(body)))
    share_weights(eager, model)  # not before: parameters that something else shares are not fused

    if reference is not None:
        console.rule("errors against fp32")
        results["errors"] = errors(args, body, eager, reference)
        del reference
    if args.device == "cuda":
        console.rule("five batches queued behind a long kernel")
        results["queued"] = queued(args, body)
    console.rule("time of a call")
    results["times_ms"] = times(args, body, eager)
    if args.profile and args.device == "cuda":
        profile(args, body)
    console.print(str(fgc.report(body)))
    print(json.dumps(results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="leave the projections apart")
    parser.add_argument("--batches", type=int, default=200, help="random batches for the error check")
    parser.add_argument("--no-errors", dest="errors", action="store_false")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--sizes", type=int, nargs="*", default=[8, 30, 64, 128, 512, 2048])
    parser.add_argument("--profile", action="store_true", help="kernels of one replay at 30 tokens")
    return parser.parse_args()


def build(args: argparse.Namespace) -> nn.Module:
    """The body of a model with Qwen3-8B's shapes, scaled by ``--hidden``, random weights."""
    scale = args.hidden / 4096
    return build_preset(
        "qwen3-8b",
        torch.device(args.device),
        torch.bfloat16 if args.device == "cuda" else torch.float32,
        layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=int(12288 * scale),
        num_attention_heads=max(2, int(32 * scale)),
        num_key_value_heads=max(1, int(8 * scale)),
        vocab_size=151936 if args.hidden == 4096 else 1024,
    )


def share_weights(copied: nn.Module, original: nn.Module) -> None:
    """Let both models use one set of weights, so that the second costs no memory."""
    for ours, theirs in zip(copied.parameters(), original.parameters(), strict=True):
        ours.data = theirs.data


def random_batch(args: argparse.Namespace, most: int) -> tuple[fgc.PrefillBatch, Tensor]:
    """A batch of 1 to 16 requests, its token count log-uniform up to ``most``."""
    tokens = min(most, max(1, int(2 ** random.uniform(0, torch.tensor(most).log2().item() + 0.01))))
    requests = random.randint(1, min(16, tokens))
    cuts = sorted(random.sample(range(1, tokens), requests - 1))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    batch = fgc.PrefillBatch(lengths, device=args.device)
    return batch, torch.randint(1000, (1, tokens), device=args.device)


def call(body: nn.Module, batch: fgc.PrefillBatch, ids: Tensor) -> Tensor:
    with torch.inference_mode(), batch:
        return body(input_ids=ids, position_ids=batch.position_ids[None], use_cache=False)[0]


def plain(model: nn.Module, batch: fgc.PrefillBatch, ids: Tensor) -> Tensor:
    """The same packed call of a transformers model, which reads the requests from the positions."""
    with torch.inference_mode():
        return model(input_ids=ids, position_ids=batch.position_ids[None], use_cache=False)[0]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def errors(args: argparse.Namespace, body: nn.Module, eager: nn.Module, reference: nn.Module) -> dict[str, Any]:
    """Random batches in A-B-A order with poison on; the largest error of ours and of eager's own."""
    most = args.max_tokens
    runners = [c.runner for c in compiled_for(body) if getattr(c, "runner", None) is not None]
    ours, theirs, unequal = [], [], 0
    before = sum(fgc.report(body).replays.values())
    pairs = max(1, args.batches // 2)
    for i in range(pairs):
        for runner in runners:
            runner.poison = (Poison.IMPOSSIBLE, Poison.PLAUSIBLE)[i % 2]
        a, b = random_batch(args, most), random_batch(args, most)
        first, second, again = call(body, *a), call(body, *b), call(body, *a)
        unequal += not torch.equal(first, again)
        for batch, got in ((a, first), (b, second)):
            want = plain(reference, *batch)
            ours.append(relative_error(got, want))
            theirs.append(relative_error(plain(eager, *batch), want))
    for runner in runners:
        runner.poison = None
    replayed = sum(fgc.report(body).replays.values()) - before
    summary = {
        "batches": len(ours), "calls": 3 * pairs, "replayed": replayed, "ours_max": max(ours), "eager_max": max(theirs),
        "ratio_of_max": max(ours) / max(theirs) if max(theirs) else None, "a_b_a_unequal": unequal,
    }  # fmt: skip
    console.print(summary)
    return summary


def queued(args: argparse.Namespace, body: nn.Module) -> dict[str, Any]:
    """Five different batches in flight at once must not read each other's metadata."""
    batches = [random_batch(args, most) for most in (30, 500, 64, 2048, 100)]
    want = [call(body, *b) for b in batches]
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(400_000_000)
    got = [call(body, *b) for b in batches]
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    summary = {
        "equal": all(torch.equal(g, w) for g, w in zip(got, want, strict=True)),
        "host_s": host,
        "total_s": total,
    }
    console.print(summary)
    return summary


def times(args: argparse.Namespace, body: nn.Module, eager: nn.Module) -> dict[str, dict[str, float]]:
    """Median call time by token count: two requests, rotating inputs."""
    table = Table("tokens", "eager, ms", "full_prefill, ms", "host before launch returns, ms", "route")
    rows: dict[str, dict[str, float]] = {}
    for tokens in args.sizes:
        if tokens > args.max_tokens:
            continue
        batch = fgc.PrefillBatch([tokens // 2, tokens - tokens // 2], device=args.device)
        inputs = [torch.randint(1000, (1, tokens), device=args.device) for _ in range(8)]
        device = torch.device(args.device)
        slow = median_ms(partial(plain, eager, batch), inputs, device, repeats=max(5, args.repeats // 5))
        fast = median_ms(partial(call, body, batch), inputs, device, repeats=args.repeats)
        host = median_ms(partial(call, body, batch), inputs, device, repeats=args.repeats, wait=False)
        with batch:
            route = fgc.explain(body, input_ids=inputs[0], position_ids=batch.position_ids[None], use_cache=False)
        table.add_row(str(tokens), f"{slow:.2f}", f"{fast:.2f}", f"{host:.3f}", route)
        rows[str(tokens)] = {"eager": slow, "full_prefill": fast, "host": host}
    console.print(table)
    return rows


def profile(args: argparse.Namespace, body: nn.Module) -> None:
    """Which kernels one replay at 30 tokens launches."""
    batch = fgc.PrefillBatch([15, 15], device=args.device)
    ids = torch.randint(1000, (1, 30), device=args.device)
    call(body, batch, ids)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        call(body, batch, ids)
        torch.cuda.synchronize()
    kernels: dict[str, tuple[int, float]] = {}
    for event in prof.events():
        count, total = kernels.get(event.name, (0, 0.0))
        kernels[event.name] = (count + 1, total + event.device_time)
    table = Table("kernel", "launches", "us each", "us in all")
    for name, (count, total) in sorted(kernels.items(), key=lambda kv: -kv[1][1])[:25]:
        table.add_row(name[:70], str(count), f"{total / count:.1f}", f"{total:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
