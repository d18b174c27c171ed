"""FlashAttention from its own packages: FA3 (fa3-fwd), FA4 (flash-attn-4) or FA2 (flash-attn), whichever is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend, Sentinel
from fullgraph_compile.attention.flash_libraries import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    FlashLibrary,
)
from fullgraph_compile.attention.real_rows import PerCall, RealRows
from fullgraph_compile.attention.reasons import no_cuda
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.ops import AttentionSite


class FlashAttnBackend(AttentionBackend):
    """The first of ``libraries`` that is installed and runs on the device; one for all sites.

    All lengths are read on the device; the bounds of query and key lengths are those of the bucket.

    NOTE: No kernel writes rows past the last offset.  Where keys are arguments, FA3 and FA2 are given one more request
    that holds the padded rows and has no keys, for which they write zeros.  A page table has no row for it, so with
    pages, and with FA4, those rows are zeroed by one more kernel.

    Attributes:
        libraries: in the order of choice.
    """

    name: ClassVar[str] = "flash_attn"
    sentinel: ClassVar[Sentinel] = Sentinel()
    paged: ClassVar[bool] = True
    libraries: ClassVar[tuple[type[FlashLibrary], ...]] = (FlashAttention3, FlashAttention4, FlashAttention2)

    def __init__(self) -> None:
        self._rows: PerCall[RealRows] = PerCall()
        self._library: FlashLibrary | None = None

    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        library = self._choose(device)
        return library if isinstance(library, list) else library.site_reasons(site)

    def supports_pages(self, page_size: int, device: torch.device) -> list[str]:
        library = self._choose(device)
        return library if isinstance(library, list) else library.page_reasons(page_size)

    def _choose(self, device: torch.device) -> FlashLibrary | list[str]:
        """The library for a device, or why there is none."""
        if reasons := no_cuda(device):
            return reasons
        for kind in self.libraries:
            why = [kind.absent()] if kind.absent() else kind().device_reasons(device)
            if not why:
                return kind()
            reasons += why
        return reasons

    def _chosen(self, device: torch.device) -> FlashLibrary:
        if self._library is None:
            library = self._choose(device)
            if isinstance(library, list):
                raise RuntimeError(f"{self.name} attention cannot run: {'; '.join(library)}")
            self._library = library
        return self._library

    def plan(self, batch: PrefillBatch, static: StaticBatch, sites: Sequence[AttentionSite]) -> None:
        library = self._chosen(static.cu_q.device)
        if not static.tokens or not (self._zeroes(library, static) or self._cleans(library, static)):
            return
        rows = self._rows.get(static)
        if rows is None:
            rows = RealRows(static, {site.dtype for site in sites})
            self._rows.set(static, rows)
        rows.update()

    @staticmethod
    def _zeroes(library: FlashLibrary, static: StaticBatch) -> bool:
        """Whether padded rows of the output are zeroed here."""
        return static.cache is not None or not library.zeros

    @staticmethod
    def _cleans(library: FlashLibrary, static: StaticBatch) -> bool:
        """Whether padded rows of V are zeroed here."""
        return static.cache is None and library.reads_past_requests

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
        if not q.shape[0]:
            return q.new_zeros(q.shape[0], site.heads, site.value_head_size)
        library = self._chosen(q.device)
        rows = self._rows.get(static)
        zeroes, cleans = self._zeroes(library, static), self._cleans(library, static)
        if (zeroes or cleans) and rows is None:
            raise RuntimeError(f"{self.name} attention of {site.module or site.node} runs before it was planned")
        # The kernels need the elements of a head beside each other; rows may be any distance apart.
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        if static.cache is not None:
            k, v = static.cache.k[site.index], static.cache.v[site.index]
        elif cleans:
            assert rows is not None
            v = rows.only(v)
        out = library.attend(q, k, v, slopes, site, static)
        if zeroes:
            assert rows is not None
            return rows.only(out)
        return out.contiguous()
