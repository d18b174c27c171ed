"""The body as it runs: compiled pieces and attention calls in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend
from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.compilers import Compiled
from fullgraph_compile.graphs import below
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.passes.split_pieces import PieceCall, Pieces


@dataclass(frozen=True)
class Program:
    """A plain loop over pieces and attention calls.

    Under capture the loop becomes one graph; at replay it costs nothing.  Attention stays outside of the compiler:
    its calls see Python objects, and no cache passes through functionalisation.
    """

    pieces: Pieces
    compiled: tuple[Compiled, ...]
    sites: tuple[AttentionSite, ...]
    attention: AttentionBackend

    def run(self, inputs: Sequence[Any], static: StaticBatch) -> list[Tensor]:
        """Run the body at the size of ``inputs``.

        Args:
            inputs: values of the placeholders, in order; sizes are integers.
            static: the metadata that attention reads.
        """
        values: list[Any] = [*inputs, *[None] * (self.pieces.slots - len(inputs))]
        for step in self.pieces.steps:
            if isinstance(step, PieceCall):
                results = self.compiled[step.kind](*[values[i] for i in step.inputs])
                for slot, result in zip(step.outputs, results, strict=True):
                    values[slot] = result
                del results
            else:
                operands: list[Any] = [None if i is None else values[i] for i in step.inputs]
                q, k, v, sinks, slopes = operands
                with below():
                    values[step.output] = self.attention.run(q, k, v, sinks, slopes, self.sites[step.site], static)
                del operands, q, k, v
            for slot in step.drop:
                values[slot] = None
        return [values[slot] for slot in self.pieces.outputs]
