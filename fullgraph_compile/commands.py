"""The commands that measure: ``fgc ladder`` and ``fgc bench``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fullgraph_compile.bench.models import DTYPES, PRESETS, SMALL, build
from fullgraph_compile.bench.names import ROUTES
from fullgraph_compile.ladder import check_lengths
from fullgraph_compile.options import parse_bytes


def add_ladder(commands: Any) -> argparse.ArgumentParser:
    """Put ``ladder`` among the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "ladder", help="measure which token buckets pay on this machine", allow_abbrev=False,
        description="Time graphs and the compiled route by token count, choose the fewest buckets that cost next to "
        "nothing, and compare them with the default ladder.  The last line is what to give as buckets=.",
    )  # fmt: skip
    _add_model(parser)
    parser.add_argument("--max-tokens", type=int, default=2048, metavar="N", help="largest size (default: 2048)")
    parser.add_argument(
        "--lengths", metavar="FILE",
        help="token counts of your calls: a JSON list, a JSON object of counts to how often each comes, or one a line",
    )  # fmt: skip
    parser.add_argument(
        "--memory-budget", metavar="BYTES", help="what graphs may take, as in 300MiB (default: no limit)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the timings and the choice")
    parser.set_defaults(run=ladder)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help=f"{', '.join(PRESETS)} (shapes with random weights), or a model folder (default: qwen3-8b; on a CPU "
        f"{SMALL})",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers of a preset")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where (default: the GPU, if there is one)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (default: bfloat16; cpu: float32)")
    parser.add_argument("--attention", default="auto", metavar="NAME", help="the attention backend (default: auto)")
    parser.add_argument("--compiler", choices=("inductor", "aot_eager", "eager"), help="default: inductor; cpu: eager")


def model_of(parser: argparse.ArgumentParser, args: argparse.Namespace, console: Console) -> tuple[Any, torch.device]:
    """The body that was asked for, and its device; on a CPU a small one in the place of a large preset."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; valid is cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    name = args.model or ("qwen3-8b" if device.type == "cuda" else SMALL)
    if device.type == "cpu" and name in PRESETS and name != SMALL and args.layers is None:
        console.print(f"{name} is too large to be measured on a CPU: {SMALL} is measured in its place.", markup=False)
        name = SMALL
    args.model = name
    dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    args.dtype = str(dtype).removeprefix("torch.")
    try:
        return build(name, device, dtype, layers=args.layers), device
    except (ValueError, OSError) as error:
        parser.error(str(error))


def add_bench(commands: Any) -> argparse.ArgumentParser:
    """Put ``bench`` among the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="time a model by every route, against the limit of this machine", allow_abbrev=False,
        description="Time calls by token count: eager, torch.compile, reduce-overhead, the pieces captured one by one, "
        "and one graph; beside them the time in which the machine could read the weights or multiply with them.",
    )  # fmt: skip
    _add_model(parser)
    parser.add_argument(
        "--tokens", type=int, nargs="+", metavar="N",
        help="token counts (default: 8 30 64 128 256 512 1024 2048; cpu: 8 30 64)",
    )  # fmt: skip
    parser.add_argument(
        "--routes", nargs="+", choices=ROUTES, metavar="ROUTE",
        help=f"of {', '.join(ROUTES)} (default: all; cpu: eager compiled full_prefill)",
    )  # fmt: skip
    parser.add_argument("--measured", action="store_true", help="the measured ladder in place of the default one")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="calls for each time (default: 50)")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many calls of random lengths besides")
    parser.add_argument(
        "--random-seconds", type=float, default=60.0, metavar="S", help="most time for them, each route (default: 60)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--plot", nargs="+", metavar="FILE", help="draw it: .png or .svg (needs matplotlib)")
    parser.set_defaults(run=bench_command)
    return parser


def bench_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """``fgc bench``."""
    from fullgraph_compile.bench.run import Settings, bench
    from fullgraph_compile.bench.show import plot, print_result

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 150)
    for path in args.plot or ():
        if Path(path).suffix not in (".png", ".svg"):
            parser.error(f"--plot {path} must end in .png or .svg")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "fullgraph-compile[bench]"')
    if any(n < 1 for n in (*(args.tokens or ()), args.repeats)):
        parser.error("--tokens and --repeats take positive integers")
    body, device = model_of(parser, args, console)
    cuda = device.type == "cuda"
    if not cuda:
        console.print(
            "No GPU: CUDA graphs, reduce-overhead, pieces and device memory cannot be measured here. full_prefill is "
            "played by the tape, which shows padding and that it runs, not how fast it is."
        )
    sizes = tuple(sorted(set(args.tokens or ((8, 30, 64, 128, 256, 512, 1024, 2048) if cuda else (8, 30, 64)))))
    options: dict[str, Any] = {
        "max_tokens": sizes[-1], "attention": args.attention, "graphs": "auto" if cuda else "tape",
        "compiler": args.compiler or ("inductor" if cuda else "eager"),
    }  # fmt: skip
    if args.measured:
        options["buckets"] = "measured"
    routes = tuple(args.routes or (ROUTES if cuda else ("eager", "compiled", "full_prefill")))
    settings = Settings(sizes, routes, options, args.repeats, args.random, args.random_seconds)
    result = bench(body, args.model, device, settings, lambda text: print(f"fgc bench: {text}", file=sys.stderr))
    console.print(result.report, markup=False)
    if args.json:
        write_json(args.json, {**result.as_dict(), "layers": args.layers, "command": " ".join(["fgc", *sys.argv[1:]])})
    if args.plot:
        plot(result, args.plot)
    print_result(result, console)
    return 0


def read_lengths(path: str) -> tuple[tuple[int, float], ...]:
    """Token counts from a file.

    Raises:
        ValueError, TypeError: the file holds something else.
    """
    text = Path(path).read_text()
    try:
        try:
            given = json.loads(text)
        except json.JSONDecodeError:
            given = [int(line) for line in text.split()]
        if isinstance(given, dict):
            given = {int(tokens): weight for tokens, weight in given.items()}
    except ValueError as error:
        raise ValueError(
            f"--lengths {path}: {error}; the file must hold a JSON list of token counts, a JSON object of token counts "
            "to how often each comes, or one count a line"
        ) from None
    return check_lengths([given] if isinstance(given, int) else given)


def ladder(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """``fgc ladder``."""
    import fullgraph_compile as fgc

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        lengths = read_lengths(args.lengths) if args.lengths else None
        budget = parse_bytes("--memory-budget", args.memory_budget) if args.memory_budget else None
        if args.max_tokens < 1:
            raise ValueError(f"--max-tokens {args.max_tokens} must be a positive integer")
    except (OSError, ValueError, TypeError) as error:
        parser.error(str(error))
    body, device = model_of(parser, args, console)
    cuda = device.type == "cuda"
    if not cuda:
        console.print(
            "No GPU: graphs are played by the tape, which is slower than no graph at all. This shows how a ladder is "
            "chosen, not which one pays."
        )
    options: dict[str, Any] = {
        "buckets": "measured", "max_tokens": args.max_tokens, "attention": args.attention,
        "compiler": args.compiler or ("inductor" if cuda else "eager"), "graphs": "auto" if cuda else "tape",
    }  # fmt: skip
    given = {"lengths": lengths, "memory_budget": budget}
    fgc.compile(body, **options, **{k: v for k, v in given.items() if v is not None})
    report = fgc.warmup(body)
    found = report.ladder
    if found is None:
        console.print(str(report), markup=False)
        return 1
    console.print(str(found), markup=False)
    if report.cut:
        console.print(report.cut, markup=False)
    if args.json:
        write_json(args.json, {"model": args.model, "device": str(device), "dtype": args.dtype, **found.as_dict()})
    console.print(f"buckets={list(found.buckets)}" if found.buckets else 'graphs="none"', markup=False)
    return 0


def write_json(path: str, content: Any) -> None:
    """Write a file whose folder need not exist yet."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n")
