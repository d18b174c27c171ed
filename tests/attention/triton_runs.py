"""What the tests of our own kernel share: pages of chance, and a run whose output starts as rubbish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention.triton import TritonAttention
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import Inputs
from tests.attention.replaying import NAN, in_pages

CUDA = torch.device("cuda", 0)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def paged(inputs: Inputs, static: Any, k_lens: Sequence[int], page_size: int, *, max_k: int = 0, seed: int = 0) -> Any:
    """The same keys and values in pages, in a shuffled order; every other cell of the pages holds NaN."""
    wide = replace(static, max_k=max(static.max_k, max_k))
    pages = sum(-(-n // page_size) for n in k_lens) + 4  # some of them are nobody's
    return in_pages(wide, inputs, k_lens, page_size, pages=pages, seed=seed)


def run(site: AttentionSite, inputs: Inputs, static: Any, backend: TritonAttention | None = None) -> Tensor:
    if inputs.q.is_cuda:
        assert TritonAttention().supports(site, CUDA) == []
        rubbish = [inputs.q.new_full((inputs.q.shape[0], site.heads, site.value_head_size), NAN) for _ in range(3)]
        del rubbish  # the allocator gives the output these bytes
    return (backend or TritonAttention()).run(*inputs.tensors(), site, static)
