"""What an attention backend is: what it can do, what an unused request slot holds for it, and how it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.ops import AttentionSite


@dataclass(frozen=True)
class Sentinel:
    """What an unused request slot holds.

    Attributes:
        q_len: new tokens of the slot.
        k_len: cached and new tokens of the slot.
        page: page that padded tokens are written to; it belongs to no request.
    """

    q_len: int = 0
    k_len: int = 0
    page: int = 0


class AttentionBackend(ABC):
    """One way to compute attention over a packed batch.

    ``name`` is what ``attention=`` takes.  ``sentinel`` has no default: staging writes what the backend declares, so
    one that says nothing cannot be registered.

    Attributes:
        paged: it reads keys from the pages of a KV cache.
        packed: it reads keys that are given as arguments, where there is no cache.
    """

    name: ClassVar[str]
    sentinel: ClassVar[Sentinel]
    paged: ClassVar[bool] = False
    packed: ClassVar[bool] = True

    @abstractmethod
    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        """Why the backend cannot serve a site on a device, each reason in words; empty = it can."""

    def supports_pages(self, page_size: int, device: torch.device) -> list[str]:
        """Why the backend cannot read a KV cache with pages of ``page_size`` tokens; empty = it can."""
        return [] if self.paged else ["it reads no KV cache"]

    def plan(self, batch: PrefillBatch, static: StaticBatch, sites: Sequence[AttentionSite]) -> None:  # noqa: B027
        """Prepare a call on the host, outside of the graph, after ``static`` was staged.  By default nothing.

        It must not wait for the device.  What the graph reads must be written in place: its addresses were fixed at
        capture.

        Args:
            batch: the requests.
            static: the metadata that the call will read; of a bucket always the same object.
            sites: all sites of the body.
        """

    @abstractmethod
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        site: AttentionSite,
        static: StaticBatch,
    ) -> Tensor:
        """Attend, inside the graph.

        What the call does may depend on shapes, on ``site`` and on the integers of ``static``, all fixed at capture,
        and never on a value read from a tensor on the host.

        Args:
            q: ``[static.tokens, heads, head_size]``; rows past the real total hold anything, NaN too.
            k: ``[key rows, kv_heads, head_size]``, requests laid out by ``static.cu_k``; so is ``v``.  With a cache
                these are the new rows only, which are in the cache already: keys are read from
                ``static.cache.k[site.index]``, through ``static.page_table``.
            v: ``[key rows, kv_heads, value_head_size]``.
            sinks: ``[heads]`` or None.
            slopes: ``[heads]`` or None.

        Returns:
            ``[static.tokens, heads, value_head_size]`` in the dtype of ``q``, contiguous, and zero in every row past
            the real total and in every row that sees no key.
        """
