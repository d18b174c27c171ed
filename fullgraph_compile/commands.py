"""The commands that measure: ``fgc ladder`` and ``fgc bench``."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from fullgraph_compile.bench.arguments import (
    add_model,
    compile_options,
    filled,
    fitting_sizes,
    integer,
    model_of,
    read_lengths,
    seconds,
    settle,
)
from fullgraph_compile.bench.files import check_files, write_files, write_json
from fullgraph_compile.bench.names import ROUTES
from fullgraph_compile.bench.output import Output
from fullgraph_compile.bench.timing import machine
from fullgraph_compile.options import parse_bytes
from fullgraph_compile.report import first_lines

OK, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

# Token counts that are measured where none were given, on a CPU the first three of them; and the largest of a ladder.
_SIZES = (8, 30, 64, 128, 256, 512, 1024, 2048)
_MOST = 2048


def add_ladder(commands: Any) -> argparse.ArgumentParser:
    """Put ``ladder`` among the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "ladder", help="measure which token buckets pay on this machine", allow_abbrev=False,
        description="Time graphs and the compiled route by token count, choose the fewest buckets that cost next to "
        "nothing, and compare them with the default ladder.  The last line is what to give as buckets=.",
    )  # fmt: skip
    add_model(parser)
    parser.add_argument(
        "--max-tokens", type=integer(1), metavar="N", help=f"largest size (default: {_MOST}, or what the model takes)"
    )
    parser.add_argument(
        "--lengths", type=filled, metavar="FILE",
        help="token counts of your calls: a JSON list, a JSON object of counts to how often each comes, or one a line",
    )  # fmt: skip
    parser.add_argument(
        "--memory-budget", metavar="BYTES", help="what graphs may take, as in 300MiB (default: no limit)"
    )
    parser.add_argument("--json", type=filled, metavar="FILE", help="write the timings and the choice")
    parser.set_defaults(run=ladder)
    return parser


def add_bench(commands: Any) -> argparse.ArgumentParser:
    """Put ``bench`` among the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="time a model by every route, against the limit of this machine", allow_abbrev=False,
        description="Time calls by token count: eager, torch.compile, reduce-overhead, the pieces captured one by one, "
        "and one graph; beside them the time in which the machine could read the weights or multiply with them.",
    )  # fmt: skip
    add_model(parser)
    parser.add_argument(
        "--tokens", type=integer(1), nargs="+", metavar="N",
        help=f"token counts (default: {' '.join(map(str, _SIZES))}; cpu: {' '.join(map(str, _SIZES[:3]))})",
    )  # fmt: skip
    parser.add_argument(
        "--routes", nargs="+", choices=ROUTES, metavar="ROUTE",
        help=f"of {', '.join(ROUTES)} (default: all; cpu: eager compiled full_prefill)",
    )  # fmt: skip
    parser.add_argument("--measured", action="store_true", help="the measured ladder in place of the default one")
    parser.add_argument("--repeats", type=integer(1), default=50, metavar="N", help="calls for each time (default: 50)")
    parser.add_argument(
        "--random", type=integer(0), default=0, metavar="N", help="so many calls of random lengths besides"
    )
    parser.add_argument(
        "--random-seconds", type=seconds, default=60.0, metavar="S", help="most time for them, each route (default: 60)"
    )
    parser.add_argument("--json", type=filled, metavar="FILE", help="write everything that was measured")
    parser.add_argument(
        "--plot", type=filled, nargs="+", metavar="FILE", help="draw it: .png or .svg (needs matplotlib)"
    )
    parser.set_defaults(run=bench_command)
    return parser


def bench_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """``fgc bench``."""
    from fullgraph_compile.bench.run import Settings, bench
    from fullgraph_compile.bench.show import plot, print_result

    console, aside = Output(width=150), Output(stderr=True)
    for path in args.plot or ():
        if Path(path).suffix not in (".png", ".svg"):
            parser.error(f"--plot {path} must end in .png or .svg")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "fullgraph-compile[bench]"')
    outputs = [("--json", args.json), *(("--plot", path) for path in args.plot or ())]
    check_files(parser, outputs)
    device = settle(parser, args, console)
    cuda = device.type == "cuda"
    body = model_of(parser, args, device)
    sizes = fitting_sizes(parser, "--tokens", args.tokens, _SIZES if cuda else _SIZES[:3], body)
    if not cuda:
        console.print(
            "No GPU: CUDA graphs, reduce-overhead, pieces and device memory cannot be measured here. full_prefill is "
            "played by the tape, which shows padding and that it runs, not how fast it is."
        )
    options: dict[str, Any] = {**compile_options(args, device), "max_tokens": sizes[-1]}
    if args.measured:
        options["buckets"] = "measured"
    routes = tuple(args.routes or (ROUTES if cuda else ("eager", "compiled", "full_prefill")))
    settings = Settings(sizes, routes, options, args.repeats, args.random, args.random_seconds)
    result = bench(body, args.model, device, settings, lambda text: aside.print(f"{parser.prog}: {text}"))
    console.print(result.report)
    print_result(result, console)
    content = {**result.as_dict(), "layers": args.layers, "command": _command()}
    files = [("--json", args.json, partial(write_json, content=content))]
    if result.sizes:
        files += [("--plot", path, partial(plot, result)) for path in args.plot or ()]
    elif args.plot:
        console.print("No call was timed, so there is nothing to draw: --plot writes no file.")
    written = write_files(parser.prog, files, aside)
    if result.interrupted:
        return INTERRUPTED
    return OK if written and result.sizes and not {*result.failed} & {*(args.routes or ())} else FAILED


def ladder(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """``fgc ladder``."""
    import fullgraph_compile as fgc

    console, aside = Output(), Output(stderr=True)
    try:
        lengths = read_lengths(args.lengths) if args.lengths else None
        budget = None if args.memory_budget is None else parse_bytes("--memory-budget", args.memory_budget)
    except ValueError as error:
        parser.error(str(error))
    check_files(parser, [("--json", args.json)])
    device = settle(parser, args, console)
    body = model_of(parser, args, device)
    given = None if args.max_tokens is None else [args.max_tokens]
    (max_tokens,) = fitting_sizes(parser, "--max-tokens", given, (_MOST,), body)
    if device.type != "cuda":
        console.print(
            "No GPU: graphs are played by the tape, which is slower than no graph at all. This shows how a ladder is "
            "chosen, not which one pays."
        )
    choice = {"lengths": lengths, "memory_budget": budget}
    options = {k: v for k, v in choice.items() if v is not None} | compile_options(args, device)
    try:
        fgc.compile(body, buckets="measured", max_tokens=max_tokens, **options)
        report = fgc.warmup(body)
    except Exception as error:
        aside.print(f"{parser.prog}: nothing could be measured: {first_lines(error, 3)}")
        return FAILED
    found = report.ladder
    if found is None:
        console.print(str(report))
        return FAILED
    console.print(str(found))
    if report.cut:
        console.print(report.cut)
    console.print(f"buckets={list(found.buckets)}" if found.buckets else 'graphs="none"')
    content = {
        "machine": machine(), "command": _command(), "model": args.model, "layers": args.layers, "device": str(device),
        "dtype": args.dtype, "max_tokens": max_tokens, "lengths": lengths, "memory_budget_bytes": budget,
        "attention": args.attention, "compiler": args.compiler, "cut": report.cut, **found.as_dict(),
    }  # fmt: skip
    written = write_files(parser.prog, [("--json", args.json, partial(write_json, content=content))], aside)
    return OK if written else FAILED


def _command() -> str:
    return shlex.join(["fgc", *sys.argv[1:]])
