from dataclasses import dataclass
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from torch import Tensor
from fullgraph_compile.attention import rig
from typing import Any
from dataclasses import fields
import dataclasses
@dataclass(frozen=True)
class Static(StaticBatch):
    cache: Any = None
    page_table: Tensor | None = None
    slot_ids: Tensor | None = None
class Batch(PrefillBatch):
    def __init__(self, new, cached=None, *, device=None, cache=None, pages=None):
        super().__init__(new, device=device)
        self.cached_tokens = list(cached or [0]*len(new))
        self.longest = max(n + c for n, c in zip(new, self.cached_tokens, strict=True))
        if cache is not None:
            cache.check_pages(pages, [n+c for n,c in zip(new, self.cached_tokens)])
if "cache" not in {f.name for f in fields(StaticBatch)}:
    rig.StaticBatch = Static
    rig.PrefillBatch = Batch
