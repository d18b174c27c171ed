"""What every kind of traced graph needs on its way to a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fullgraph_compile.attention import AttentionBackend, UnsupportedAttention, create_attention
from fullgraph_compile.compilers import TraceAgain, cache_counts, compile_piece
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.options import BadOption, Options
from fullgraph_compile.passes.autocast_regions import forward_of
from fullgraph_compile.passes.common import (
    Refusal,
    output_node,
    placeholders,
    value_of,
)
from fullgraph_compile.passes.pad_to_bucket import Padding
from fullgraph_compile.passes.split_pieces import Pieces
from fullgraph_compile.progress import steps
from fullgraph_compile.report import Report, log

WRITES = "writes to an input or a buffer, which a replay would do to its own copy"


class Refused(Exception):
    """Why a traced graph is not captured; caught within the package, never shown to Dynamo."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


def attention_for(sites: Sequence[AttentionSite], options: Options, device: torch.device) -> AttentionBackend:
    """The attention backend for the sites.

    Raises:
        BadOption: the one that was named cannot serve them.
        Refused: none can that "auto" may take.
    """
    try:
        return create_attention(options.attention, sites, device)
    except UnsupportedAttention as error:
        if options.attention != "auto":
            raise BadOption(str(error)) from None
        raise Refused(Reason.ATTENTION, str(error)) from None


def some_of(refusals: Sequence[Refusal], most: int = 3) -> str:
    text = "; ".join(map(str, refusals[:most]))
    return f"{text}; and {len(refusals) - most} more" if len(refusals) > most else text


def graph_kind(options: Options, device: torch.device) -> str:
    """How graphs are recorded on this device."""
    if options.graphs == "auto":
        return "cuda" if device.type == "cuda" else "none"
    return options.graphs


def device_of(gm: GraphModule, weights: frozenset[str]) -> torch.device:
    """Where the body runs: the device of its weights, else of its first tensor with a size."""
    nodes = placeholders(gm)
    for node in sorted(nodes, key=lambda n: n.name not in weights):
        value = value_of(node)
        if isinstance(value, Tensor) and value.dim():
            device = value.device
            if device.type == "cuda" and device.index is None:
                return torch.device("cuda", torch.cuda.current_device())
            return device
    return torch.device("cpu")


def move_scalars(gm: GraphModule, weights: frozenset[str], device: torch.device) -> None:
    """Let 0-d CPU inputs stand for 0-d tensors on the device: a graph reads them from a static buffer there."""
    if device.type == "cpu":
        return
    for node in placeholders(gm):
        value = value_of(node)
        if isinstance(value, Tensor) and node.name not in weights and not value.dim() and value.device.type == "cpu":
            with value.fake_mode:  # type: ignore[attr-defined]
                node.meta["example_value"] = torch.empty((), dtype=value.dtype, device=device)


def compile_pieces(pieces: Pieces, options: Options, report: Report) -> tuple[Any, ...]:
    """Compile each distinct piece once.  One that the compiler refuses is interpreted, and the log says so."""
    compiled = []
    for i, kind in enumerate(
        steps(pieces.kinds, f"compiling ({options.compiler})", show=options.show_progress, total=len(pieces.kinds))
    ):
        compiler = "eager" if i in pieces.interpret else options.compiler
        hits, misses = cache_counts()
        try:
            compiled.append(compile_piece(kind, pieces.examples[i], compiler))
        except TraceAgain:
            raise
        except Exception as error:
            log.warning("%s: piece %d is run as traced, %s refused it: %r", report.name, i, compiler, error)
            compiled.append(forward_of(kind))
        # A piece may be compiled twice, once for few tokens.
        found, made = cache_counts()
        report.cached_pieces += found > hits and made == misses
    report.pieces += len(pieces.kinds)
    return tuple(compiled)


def weight_forms(body: GraphModule, weights: Sequence[int]) -> dict[int, tuple[torch.dtype, tuple[int, ...]]]:
    nodes = placeholders(body)
    return {i: (value_of(nodes[i]).dtype, tuple(value_of(nodes[i]).shape)) for i in weights}


def outputs_of(body: GraphModule, padding: Padding) -> list[tuple[Tensor, int | None]]:
    leaves = output_node(body).args[0]
    return [(value_of(n), dim) for n, dim in zip(leaves, padding.outputs, strict=True)]  # type: ignore[arg-type]
