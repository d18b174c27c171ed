"""The command line: ``fgc doctor`` says what of this package can be trusted on this machine, the others measure it."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from rich.table import Table

from fullgraph_compile import attention
from fullgraph_compile.attention.conformance import Conformance, check_attention
from fullgraph_compile.bench.interrupts import raise_if_interrupted, remembered
from fullgraph_compile.bench.output import Output
from fullgraph_compile.commands import FAILED, INTERRUPTED, OK, WRONG_USE, add_bench, add_ladder

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Packages that this one works with, in the order that a person looks for them.
_BESIDE = ("triton", "transformers", "flashinfer-python", "flash-attn", "sglang")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; None = those of the process.

    Returns:
        0; 1 if what was asked for failed: a backend that was named, a route, a file; 130 after Ctrl-C.

    Raises:
        SystemExit: 0 after help and version, 2 after arguments that are not valid; the message lists those that are.
    """
    parser, commands = _parser()
    args, unknown = parser.parse_known_args(argv)
    command = commands.get(args.command)
    if command is None:
        if unknown:
            parser.error(f"unknown argument {' '.join(unknown)}; valid are {_options(parser)}, {', '.join(commands)}")
        parser.print_help()
        return OK
    if unknown:
        command.error(f"unknown argument {' '.join(unknown)}; valid are {_options(command)}")
    run: Callable[[argparse.ArgumentParser, argparse.Namespace], int] = args.run
    with remembered():
        try:
            return run(command, args)
        except KeyboardInterrupt:
            Output(stderr=True).print(f"{command.prog}: interrupted; what was not printed or written by now is lost")
            return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(WRONG_USE, f"{self.prog}: {message}\n")


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    parser = _Parser(prog="fgc", description="Whole-forward prefill graphs for transformers.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fullgraph-compile {_version('fullgraph-compile')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    text = "check every attention backend on this machine"
    doctor = commands.add_parser(
        "doctor", help=text, allow_abbrev=False,
        description=f"{text[0].upper()}{text[1:]}: the conformance battery, as a table of probes and backends. "
        "Exits with 1 when a backend that is named fails or is not supported.",
    )  # fmt: skip
    doctor.add_argument(
        "--attention", nargs="+", action="extend", metavar="NAME", choices=sorted(attention._backends),
        help=f"check these backends only: {', '.join(sorted(attention._backends))}",
    )  # fmt: skip
    doctor.add_argument("--device", choices=("cpu", "cuda"), help="where (default: the GPU, if there is one)")
    doctor.add_argument("--dtype", choices=tuple(DTYPES), help="in what (default: all that a backend supports)")
    doctor.set_defaults(run=_doctor)
    return parser, {"doctor": doctor, "ladder": add_ladder(commands), "bench": add_bench(commands)}


def _options(parser: argparse.ArgumentParser) -> str:
    return ", ".join(option for option in parser._option_string_actions if option.startswith("--"))


# -- doctor ------------------------------------------------------------------------------------------------------------


def _doctor(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; valid is cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES.get(args.dtype)
    console = Output()
    console.print(_machine())
    names = list(dict.fromkeys(args.attention or sorted(attention._backends)))
    found: list[Conformance] = []
    try:
        for name in names:
            found.append(check_attention(name, device, dtype, show_progress=sys.stderr.isatty()))
            raise_if_interrupted()
    except KeyboardInterrupt:
        _print(console, found)
        console.print(f"\ninterrupted; not checked: {', '.join(names[len(found) :]) or 'nothing'}")
        return INTERRUPTED
    _print(console, found)
    return FAILED if args.attention and not all(c.ok for c in found) else OK


def _machine() -> str:
    """What this runs on, one fact a line."""
    lines = [
        f"fullgraph-compile {_version('fullgraph-compile')}, Python {platform.python_version()}",
        f"torch {torch.__version__}"
        + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA"),
    ]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(i)
            lines.append(f"GPU {i}: {of.name}, compute capability {of.major}.{of.minor}, {of.total_memory >> 30} GiB")
    else:
        lines.append("GPU: none")
    beside = [f"{name} {_version(name)}" for name in _BESIDE if _version(name)]
    return "\n".join([*lines, ", ".join(beside)] if beside else lines)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _print(console: Output, found: Sequence[Conformance]) -> None:
    """Probes by backends, then what is behind each cell that is not "ok"."""
    ran = [c for c in found if not c.unsupported]
    if ran:
        table = Table("probe", *(f"{c.backend}\n{c.device}, {str(c.dtype).removeprefix('torch.')}" for c in ran))
        for probe in dict.fromkeys(r.probe for c in ran for r in c.results):
            words = [{r.probe: r.word for r in c.results}.get(probe, "") for c in ran]
            style = "bold red" if "FAILED" in words else None
            table.add_row(probe, *words, style=style)
        console.print()
        console.print(table)
    for c in found:
        console.print()
        console.print(_verdict(c))


def _verdict(c: Conformance) -> str:
    if c.unsupported:
        return f"{c.backend}: unsupported on {c.device}: {'; '.join(c.unsupported)}"
    lines = [f"{c.backend}: {f'{len(c.failed)} probes FAILED' if c.failed else 'ok'}"]
    lines += [f"  {r.probe}: {r.detail}" for r in c.failed]
    reasons: dict[str, list[str]] = {}
    for r in c.results:
        if r.skipped:
            reasons.setdefault(r.skipped, []).append(r.probe)
    return "\n".join([*lines, *(f"  not supported: {', '.join(of)}: {why}" for why, of in reasons.items())])
