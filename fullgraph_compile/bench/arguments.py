"""Arguments of the commands that measure: read, and refused where that can be known before a model is made."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullgraph_compile.attention import AUTO, UnsupportedAttention, attention_names, create_attention
from fullgraph_compile.bench.models import DTYPES, PRESETS, SMALL, build, positions
from fullgraph_compile.bench.output import Output
from fullgraph_compile.ladder import check_lengths
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.report import first_lines


def integer(least: int) -> Callable[[str], int]:
    """A reader of integers from ``least`` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {least}")
        return value

    return read


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return value


def filled(text: str) -> str:
    """Any text but none, which would be taken for an argument that was not given."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; leave it out for the default")
    return text


def read_lengths(path: str) -> tuple[tuple[int, float], ...]:
    """Token counts from a file, each with how often it comes.

    Raises:
        ValueError: the file cannot be read or holds something else; the message names it and what is valid.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        try:
            given = json.loads(text)
        except json.JSONDecodeError:
            given = [int(line) for line in text.split()]
        if isinstance(given, dict):
            given = {int(tokens): weight for tokens, weight in given.items()}
        return check_lengths([given] if isinstance(given, int) else given)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"--lengths {path}: {error}; the file must hold a JSON list of token counts, a JSON object of token counts "
            "to how often each comes, or one count a line"
        ) from None


def add_model(parser: argparse.ArgumentParser) -> None:
    """What is measured, where and how."""
    parser.add_argument(
        "model", nargs="?", type=filled, metavar="MODEL",
        help=f"{', '.join(PRESETS)} (shapes with random weights), or a model folder (default: qwen3-8b; on a CPU "
        f"{SMALL})",
    )  # fmt: skip
    parser.add_argument("--layers", type=integer(1), metavar="N", help="only so many layers of a preset")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where (default: the GPU, if there is one)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (default: bfloat16; cpu: float32)")
    parser.add_argument(
        "--attention", default=AUTO, metavar="NAME", choices=attention_names(),
        help=f"the attention backend: {', '.join(attention_names())} (default: auto)",
    )  # fmt: skip
    parser.add_argument("--compiler", choices=("inductor", "aot_eager", "eager"), help="default: inductor; cpu: eager")


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace, console: Output) -> torch.device:
    """Put what was not given in the place of None, and end the command where this machine cannot do what was.

    Args:
        console: told where a large preset gives way to a small one.

    Returns:
        The device.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; valid is cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = device.type == "cuda"
    if cuda:
        device = torch.device("cuda", torch.cuda.current_device())
    elif args.compiler == "inductor":
        parser.error(
            "--compiler inductor: the tape, which plays graphs on a CPU, cannot see inside its kernels; valid here are "
            "aot_eager, eager"
        )
    args.model = args.model or ("qwen3-8b" if cuda else SMALL)
    args.dtype = args.dtype or ("bfloat16" if cuda else "float32")
    args.compiler = args.compiler or ("inductor" if cuda else "eager")
    if why := _cannot_attend(args.attention, device, args.dtype):
        valid = [name for name in attention_names() if not _cannot_attend(name, device, args.dtype)]
        parser.error(f"--attention {args.attention}: {why}; valid on {device} in {args.dtype} are {', '.join(valid)}")
    if not cuda and args.model in PRESETS and args.model != SMALL and args.layers is None:
        console.print(
            f"{args.model} is too large to be measured on a CPU: {SMALL} is measured in its place.",
        )
        args.model = SMALL
    return device


def _cannot_attend(name: str, device: torch.device, dtype: str) -> str:
    """Why a backend does not serve even plain causal attention; empty = it does, or another does in its place."""
    if name == AUTO:
        return ""
    site = AttentionSite(0, "plain attention", "", 1, 1, 64, 64, 1.0, dtype=DTYPES[dtype])
    try:
        create_attention(name, [site], device)
    except UnsupportedAttention as error:
        return "; ".join(why for reasons in error.reasons.values() for why in reasons)
    return ""


def compile_options(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Options of ``fgc.compile`` that say how, once the arguments are settled."""
    graphs = "auto" if device.type == "cuda" else "tape"
    return {"attention": args.attention, "compiler": args.compiler, "graphs": graphs}


def model_of(parser: argparse.ArgumentParser, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The body that was asked for; the command ends where it cannot be made."""
    try:
        return build(args.model, device, DTYPES[args.dtype], layers=args.layers)
    except ValueError as error:
        parser.error(str(error))
    except (OSError, ImportError, RuntimeError) as error:
        parser.error(f"{args.model} cannot be made on {device}: {first_lines(error, 1)}")


def fitting_sizes(
    parser: argparse.ArgumentParser, option: str, given: list[int] | None, default: tuple[int, ...], body: nn.Module
) -> tuple[int, ...]:
    """Token counts, ascending: those that were given, or those of the default that the body has positions for."""
    most = positions(body)
    if given and most is not None and max(given) > most:
        parser.error(
            f"{option} {max(given)}: the model takes at most {most} tokens, max_position_embeddings of its config"
        )
    fit = [n for n in default if most is None or n <= most]
    return tuple(sorted(set(given or fit or [min(default) if most is None else most])))
