"""The body as it runs: compiled pieces and attention calls in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend
from fullgraph_compile.attention.kv_write import write_site
from fullgraph_compile.batch import PrefillBatch, StaticBatch, same_device
from fullgraph_compile.compilers import Compiled
from fullgraph_compile.graphs import below
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.passes.split_pieces import PieceCall, Pieces

if TYPE_CHECKING:
    from fullgraph_compile.cache import PagedKVCache


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

    def check_cache(self, cache: PagedKVCache | None, device: torch.device) -> None:
        """Refuse a KV cache that the body's sites or its attention cannot use.

        Raises:
            ValueError: the sites differ from those of the cache, or the attention cannot read it, or nothing else.
        """
        name = f"attention={self.attention.name!r}"
        if cache is None:
            if not self.attention.packed:
                raise ValueError(f"{name} reads keys from a KV cache only; give PrefillBatch(..., cache=, pages=)")
            return
        cache.check_sites(self.sites)
        if not same_device(cache.device, device):
            raise ValueError(f"the KV cache is on {cache.device}, the body on {device}")
        if reasons := self.attention.supports_pages(cache.page_size, device):
            raise ValueError(f"{name} cannot use this KV cache: {'; '.join(reasons)}")

    def prepare(self, inputs: Sequence[Any]) -> None:
        """What must be done to the weights before their addresses are read for a capture.  By default nothing."""

    def joined(self, inputs: Sequence[Any]) -> list[Any]:
        """What the pieces read in the place of the inputs.  By default the inputs themselves."""
        return list(inputs)

    @cached_property
    def plans(self) -> bool:
        """Whether ``plan`` does anything."""
        return type(self.attention).plan is not AttentionBackend.plan

    def plan(self, batch: PrefillBatch, static: StaticBatch) -> None:
        """What attention prepares on the host for a call."""
        self.attention.plan(batch, static, self.sites)

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
                site = self.sites[step.site]
                # It computes in the dtype of its operands, whatever the caller's autocast is.
                with below(), torch._C._DisableAutocast():
                    if static.cache is not None:
                        write_site(k, v, site, static)
                    values[step.output] = self.attention.run(q, k, v, sinks, slopes, site, static)
                del operands, q, k, v
            for slot in step.drop:
                values[slot] = None
        return [values[slot] for slot in self.pieces.outputs]
