"""What the battery needs of a batch with pages, for as long as ``StaticBatch`` has no fields for them.

NOTE: does nothing once it has; then this file and its import go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fullgraph_compile.attention import rig
from fullgraph_compile.batch import PrefillBatch, StaticBatch


@dataclass(frozen=True)
class _Static(StaticBatch):
    cache: Any = None
    page_table: Tensor | None = None
    slot_ids: Tensor | None = None


class _Batch(PrefillBatch):
    def __init__(
        self, new: list[int], cached: list[int], *, device: Any, cache: Any = None, pages: Sequence[Any] = ()
    ) -> None:
        super().__init__(new, device=device)
        self.cached_tokens = cached
        lengths = [n + c for n, c in zip(new, cached, strict=True)]
        self.longest = max(lengths)
        if cache is not None:
            cache.check_pages(pages, lengths)


if "page_table" not in {f.name for f in fields(StaticBatch)}:
    rig.StaticBatch = _Static  # type: ignore[misc]
    rig.PrefillBatch = _Batch  # type: ignore[misc]
