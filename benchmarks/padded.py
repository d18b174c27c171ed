"""Whole transformers models called with padded ``[B, S]`` batches: eager, torch.compile, and one line of fgc.compile.

    python benchmarks/padded.py qwen3-0.6b qwen3-8b minilm --dtypes bfloat16
    python benchmarks/padded.py minilm --dtypes float32 bfloat16 --batches 1 8 32 128
    python benchmarks/padded.py minilm --device cpu --batches 1 4 --repeats 3
    for r in eager full_prefill compile reduce-overhead; do  # side by side: torch.compile takes minutes for 36 layers
        python benchmarks/padded.py qwen3-8b --rivals 1 8 --routes $r --turns /tmp/turns --json $r.json &
    done; wait

Random weights of the shapes of Qwen3 (as causal LMs that return the last token's logits) and of all-MiniLM-L6-v2.  A
time is the median wall time of one call from the padded ids and mask, which are on the device, to the result; inputs
rotate.  Padding: rows of ``[B, S]`` that are no tokens, beside rows of the bucket that are none.  What fgc.compile made
is compared first: in float32 with eager, else with the same weights in float32, from which it may be no more than 1.1
times as far as eager is.

Processes that are given the same ``--turns`` file compile side by side and time one after the other, each while none of
them compiles.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

import fullgraph_compile as fgc
from fullgraph_compile.bench.models import DTYPES, PRESETS
from fullgraph_compile.bench.timing import machine, median_ms

console = Console(width=130)
ROUTES = ("eager", "full_prefill", "compile", "reduce-overhead")
MODELS = ("qwen3-0.6b", "qwen3-8b", "minilm")
# Of fp32 results; of others, the factor over eager's own distance from fp32, which grows with the layers.
TOLERANCE, MOST_TO_EAGER = 1e-3, 1.1
# Inputs of each batch, and how many of them are compared.
INPUTS, COMPARED = 8, 2
# Calls of each input before it is timed: reduce-overhead replays a shape from the third on.
TIMES_BEFORE = 3


def main() -> None:
    args = arguments()
    device, turns = torch.device(args.device), Turns(args.turns)
    console.print(machine())
    found: dict[str, Any] = {"machine": machine(), "rows": []}
    for name in args.models:
        for dtype in args.dtypes:
            torch.manual_seed(0)
            random.seed(0)
            rows: list[dict[str, Any]] = []
            for row in measure(name, DTYPES[dtype], device, args, turns):
                rows.append(row)
                found["rows"].append(row)
                if args.json:
                    with open(args.json, "w") as file:
                        json.dump(found, file, indent=1)
            console.print(show(f"{name}, {dtype}", rows))


def build(name: str, dtype: torch.dtype, device: torch.device, layers: int | None) -> nn.Module:
    """A whole model with random weights."""
    import transformers

    if name == "minilm":
        config: Any = transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        kind: Any = transformers.AutoModel
    else:
        config, kind = transformers.Qwen3Config(**PRESETS[name][1]), transformers.AutoModelForCausalLM
    config.num_hidden_layers = layers or config.num_hidden_layers
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with device:
        model: nn.Module = kind.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def routes(model: nn.Module, args: argparse.Namespace) -> dict[str, nn.Module]:
    """The model by each route; all share its weights but the last, whose projections are fused."""
    made: dict[str, nn.Module] = {}
    for route in args.routes:
        if route == "eager":
            made[route] = model
        elif route == "full_prefill":
            gpu = next(model.parameters()).is_cuda
            options: dict[str, Any] = {} if gpu else {"graphs": "tape", "compiler": "eager"}
            made[route] = fgc.compile(
                copy.deepcopy(model),
                max_tokens=args.max_tokens,
                request_slots=max(args.batches),
                max_padding=4.0,
                **options,
            )
        else:
            # Not a copy: a module that torch.compile wraps stays as it is.  One symbolic graph serves every shape, as
            # the widths of padded batches do not repeat.
            made[route] = torch.compile(model, dynamic=True, mode=None if route == "compile" else route)
    return made


def batch_of(requests: int, name: str, device: torch.device, args: argparse.Namespace) -> dict[str, Tensor]:
    """Sentences of 8 to 48 tokens, padded right for an encoder and left for a decoder; its one prompt: ``--prompt``."""
    lengths = [random.randint(8, 48) for _ in range(requests)]
    if requests == 1 and name != "minilm":
        lengths = [args.prompt]
    width = max(lengths)
    rows = [[1] * n + [0] * (width - n) for n in lengths]
    mask = torch.tensor(rows if name == "minilm" else [row[::-1] for row in rows], device=device)
    return {"input_ids": torch.randint(5, 1000, mask.shape, device=device) * mask, "attention_mask": mask}


def measure(
    name: str, dtype: torch.dtype, device: torch.device, args: argparse.Namespace, turns: Turns
) -> Iterator[dict[str, Any]]:
    model = build(name, dtype, device, args.layers)
    extra = {} if name == "minilm" else {"logits_to_keep": 1, "use_cache": False}
    checked = "full_prefill" in args.routes and dtype != torch.float32
    exact = copy.deepcopy(model).float() if checked else None
    made = routes(model, args)
    batches = {n: [batch_of(n, name, device, args) for _ in range(INPUTS)] for n in args.batches}
    numbers = [torch.tensor(i) for i in range(INPUTS)]
    calls: dict[tuple[str, int], Callable[[Tensor], Tensor]] = {}
    errors: dict[int, list[float]] = {}
    for route, requests in tqdm([(r, n) for r in made for n in args.batches], desc=name, leave=False):
        if route not in ("eager", "full_prefill") and requests not in args.rivals:
            continue

        def call(i: Tensor, one: nn.Module = made[route], requests: int = requests) -> Tensor:
            with torch.inference_mode():
                return one(**batches[requests][int(i)], **extra)[0]

        calls[route, requests] = call
        if route == "full_prefill":
            errors[requests] = compare(made[route], model, exact, batches[requests][:COMPARED], extra, name)
        for i in numbers * TIMES_BEFORE:
            call(i)
    with turns.alone():
        for (route, requests), call in calls.items():
            row: dict[str, Any] = {"model": name, "dtype": str(dtype), "route": route, "batch": requests}
            before = calls_of(made[route]) if route == "full_prefill" else None
            row["ms"] = median_ms(call, numbers, device, repeats=args.repeats)
            shares = [float(x["attention_mask"].float().mean()) for x in batches[requests]]
            row["padding"] = 1 - sum(shares) / len(shares)
            if before is not None:
                row["errors"] = errors[requests]
                after = calls_of(made[route])
                replays, all_calls, real, padded = (b - a for a, b in zip(before, after, strict=True))
                row["replayed"], row["bucket_padding"] = replays / all_calls, padded / max(1, real + padded)
            yield row


class Turns:
    """Compiling side by side, timing alone: a file that is locked by all who compile, or by the one who times."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a") if path else None  # noqa: SIM115 - held as long as the process runs
        self._lock(fcntl.LOCK_SH)

    def _lock(self, how: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, how)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else with this file compiles or times."""
        self._lock(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_SH)


def compare(
    compiled: nn.Module,
    eager: nn.Module,
    exact: nn.Module | None,
    inputs: list[dict[str, Tensor]],
    extra: dict[str, Any],
    name: str,
) -> list[float]:
    """Largest relative L2 error of what is compiled, and of eager, over the rows that are tokens.

    Raises:
        SystemExit: it is not right.
    """
    worst = [0.0, 0.0]
    for given in inputs:
        # The one row of a left-padded LM is a token.
        real = given["attention_mask"].bool() if name == "minilm" else given["attention_mask"][:, -1:].bool()
        with torch.inference_mode():
            got, plain, want = (
                None if m is None else m(**given, **extra)[0][real].float() for m in (compiled, eager, exact)
            )
        for i, rows in enumerate((got, plain)):
            assert rows is not None and plain is not None
            true = plain if want is None else want
            worst[i] = max(worst[i], float((rows - true).norm() / true.norm()))
    ours, theirs = worst
    if ours > (TOLERANCE if exact is None else MOST_TO_EAGER * theirs):
        raise SystemExit(f"\n{name}, {len(inputs[0]['input_ids'])} rows: {ours:.1e} off, eager {theirs:.1e}")
    return worst


def calls_of(model: nn.Module) -> tuple[int, int, int, int]:
    """Replays, calls, real rows and padded rows up to now."""
    report = fgc.report(model)
    replays, rows = sum(report.replays.values()), sum(bucket * n for bucket, n in report.replays.items())
    padded = sum(report.padding.values())
    return replays, replays + sum(report.fallbacks.values()), rows - padded, padded


def show(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table("batch", "padding of [B, S]", *(f"{r}, ms" for r in ROUTES), "replayed", "padding of the bucket",
                  title=title)  # fmt: skip
    for batch in dict.fromkeys(r["batch"] for r in rows):
        by = {r["route"]: r for r in rows if r["batch"] == batch}
        ours = by.get("full_prefill", {})
        shares = [f"{ours[k]:.0%}" if k in ours else "-" for k in ("replayed", "bucket_padding")]
        times = [f"{by[r]['ms']:.2f}" if r in by else "-" for r in ROUTES]
        table.add_row(str(batch), f"{next(iter(by.values()))['padding']:.0%}", *times, *shares)
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument(
        "--rivals", nargs="+", type=int, default=[1, 8, 32, 128], help="batches that torch.compile is timed with, too"
    )
    parser.add_argument("--prompt", type=int, default=30, help="tokens of a decoder's batch of one")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", help="a file that processes share so that each times while none compiles")
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
