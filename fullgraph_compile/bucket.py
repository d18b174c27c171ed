"""One captured size: what it reads and what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.caller_rows import CallerRows
from fullgraph_compile.graphs import RecordedGraph


@dataclass(frozen=True)
class Inputs:
    """What each placeholder of the body is, by index.

    Attributes:
        sizes: the token count itself.
        tokens: index -> token dim, for tensors that are padded to the bucket.
        weights: parameters and buffers; a graph keeps their addresses.
        values: other tensors, copied into static buffers at each call.
        forms: dtype and shape of each weight as it was traced.
    """

    sizes: tuple[int, ...]
    tokens: dict[int, int]
    weights: tuple[int, ...]
    values: tuple[int, ...]
    forms: dict[int, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)


Outputs = Sequence[tuple[Tensor, int | None]]
"""Fake outputs of the body, each with its token dim, or None where the whole leaf is returned."""


@dataclass(frozen=True)
class Rows:
    """What a call of some token count gives, and what it gets.

    Made once for each token count: a view costs as much as a small copy.

    Attributes:
        inputs: index, shape and dtype of each input that has a token dim, and whether torch may keep it negated or
            conjugated.
        outputs: the first rows of the bucket's outputs, and all of those that have none.
    """

    inputs: list[tuple[int, torch.Size, torch.dtype, bool]]
    outputs: list[Tensor]


@dataclass
class Bucket:
    """One captured size: its static inputs, metadata, outputs, and its graph.

    Attributes:
        fetches: copies a call's inputs into ``inputs``, as the first node of the graph.
        brings: copies ``outputs`` to where the call gets its own, as the last node of the graph.
        kept: inputs that its graph reads when it is launched without a call.
    """

    tokens: int
    static: StaticBatch
    inputs: dict[int, Tensor]
    outputs: list[Tensor]
    fetches: CallerRows
    brings: CallerRows
    graph: RecordedGraph | None = None
    rows: dict[int, Rows] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)


def address_count(inputs: Inputs, outputs: Outputs) -> int:
    """How many addresses are staged with a call: of its inputs and of its outputs that have a token dim."""
    return len(inputs.tokens) + sum(dim is not None for _, dim in outputs)


def view(storage: Tensor, like: Tensor, dim: int | None, tokens: int) -> Tensor:
    """The beginning of a flat storage, as a tensor like another, with ``tokens`` in its token dim."""
    shape = [tokens if d == dim else int(s) for d, s in enumerate(like.shape)]
    size = 1
    for s in shape:
        size *= s
    return storage[:size].view(shape)
