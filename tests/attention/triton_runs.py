"""What the tests of our own kernel share: shuffled pages, and a run whose output starts as rubbish."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention.triton import TritonAttention
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import Inputs

NAN = float("nan")
CUDA = torch.device("cuda", 0)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def paged(inputs: Inputs, static: Any, k_lens: Sequence[int], page_size: int, *, max_k: int = 0, seed: int = 0) -> Any:
    """The same keys and values in pages, in a shuffled order; every other cell of the pages holds NaN."""
    need = [-(-n // page_size) for n in k_lens]
    ids = list(range(1, sum(need) + 4))
    random.Random(seed).shuffle(ids)
    width = max(1, *need, -(-max_k // page_size))
    table = torch.zeros(static.slots, width, dtype=torch.int32)
    k, v = (t.new_full((sum(need) + 4, page_size, *t.shape[1:]), NAN) for t in (inputs.k, inputs.v))
    start = 0
    for request, (n, count) in enumerate(zip(k_lens, need, strict=True)):
        table[request, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        j = torch.arange(n)
        page, offset = table[request][j // page_size].long().to(k.device), (j % page_size).to(k.device)
        k[page, offset], v[page, offset] = inputs.k[start : start + n], inputs.v[start : start + n]
        start += n
    cache: Any = SimpleNamespace(k=(None, k), v=(None, v), page_size=page_size)
    return replace(static, max_k=max(static.max_k, max_k), cache=cache, page_table=table.to(k.device))


def run(site: AttentionSite, inputs: Inputs, static: Any, backend: TritonAttention | None = None) -> Tensor:
    if inputs.q.is_cuda:
        assert TritonAttention().supports(site, CUDA) == []
        rubbish = [inputs.q.new_full((inputs.q.shape[0], site.heads, site.value_head_size), NAN) for _ in range(3)]
        del rubbish  # the allocator gives the output these bytes
    return (backend or TritonAttention()).run(*inputs.tensors(), site, static)
