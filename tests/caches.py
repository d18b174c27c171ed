"""A small paged KV cache on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from fullgraph_compile.cache import PagedKVCache

SHAPE = (2, 8, 8)


def cache_of(pages: int = 8, page_size: int = 4, sites: Any = (SHAPE,), dtype: torch.dtype = torch.float32) -> Any:
    return PagedKVCache(sites, pages=pages, page_size=page_size, dtype=dtype, device="cpu")
