"""An engine in small: requests that grow by chunks over one paged KV cache, and what eager gives for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile.staging import Poison
from tests.models import VOCABULARY, tiny

Counts = tuple[Counter[int], Counter[fgc.Reason]]


def model(name: str) -> nn.Module:
    # Gemma 2's soft cap is in its eager attention only.
    return tiny(name, **({"attn_implementation": "eager"} if name == "Gemma2" else {}))


def counted(body: nn.Module) -> Counts:
    """How often each bucket was replayed so far, and each reason met."""
    report = fgc.report(body)
    return report.replays.copy(), report.fallbacks.copy()


def since(body: nn.Module, before: Counts) -> Counts:
    replays, fallbacks = counted(body)
    return replays - before[0], fallbacks - before[1]


def compiled(module: nn.Module, poison: Poison | None = None, **options: Any) -> nn.Module:
    options = {"max_tokens": 64, "request_slots": 4, "graphs": "tape", "compiler": "eager", **options}
    body = fgc.compile(module, **options)
    with torch.inference_mode():
        body(input_ids=torch.arange(3)[None], use_cache=False)
    if poison is not None:
        for graph in body.forward.graphs():
            graph.runner.poison = poison
    return body


def one_shot(module: nn.Module, text: Tensor) -> Tensor:
    with torch.inference_mode():
        return module(input_ids=text[None], use_cache=False)[0][0]


class Engine:
    """Requests that grow by chunks over one cache."""

    def __init__(self, body: nn.Module, cache: fgc.PagedKVCache, texts: list[Tensor]) -> None:
        self.body, self.cache, self.texts = body, cache, texts
        self.pages: list[list[int]] = [[] for _ in texts]
        self.done = [0] * len(texts)
        self.hidden: list[list[Tensor]] = [[] for _ in texts]

    def step(self, chunks: dict[int, int]) -> None:
        """Prefill so many further tokens of each request, in one call."""
        for r, n in chunks.items():
            self.cache.append(self.pages[r], self.done[r], n)
        batch = fgc.PrefillBatch(
            list(chunks.values()),
            [self.done[r] for r in chunks],
            cache=self.cache,
            pages=[self.pages[r] for r in chunks],
        )
        ids = torch.cat([self.texts[r][self.done[r] : self.done[r] + n] for r, n in chunks.items()])
        with torch.inference_mode(), batch:
            rows = self.body(input_ids=ids[None], position_ids=batch.position_ids[None], use_cache=False)[0][0]
        for (r, n), part in zip(chunks.items(), rows.split(list(chunks.values())), strict=True):
            self.hidden[r].append(part)
            self.done[r] += n

    def check(self, eager: nn.Module) -> None:
        for r, text in enumerate(self.texts):
            torch.testing.assert_close(
                torch.cat(self.hidden[r]), one_shot(eager, text[: self.done[r]]), atol=2e-5, rtol=1e-4
            )


def texts(*lengths: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(1, VOCABULARY, (n,)) for n in lengths]


def cache_for(body: nn.Module, pages: int = 64, page_size: int = 4) -> fgc.PagedKVCache:
    return fgc.PagedKVCache.for_model(body, pages=pages, page_size=page_size)
