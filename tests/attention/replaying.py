"""A bucket as a runner has it: static buffers, one graph, and batches that are staged into it without waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import Inputs, expected, inputs_for, poison_tail, static_batch

NAN = float("nan")


def host_batch(q_lens: Sequence[int], k_lens: Sequence[int] | None = None) -> PrefillBatch:
    """What planning reads of a batch; prefixes need no cache here."""
    batch = PrefillBatch(list(q_lens), device="cpu")
    if k_lens is not None:
        batch.lengths, batch.longest = list(k_lens), max(k_lens)
        batch.cached_tokens = [k - q for q, k in zip(q_lens, k_lens, strict=True)]
    return batch


def in_pages(
    static: StaticBatch, inputs: Inputs, k_lens: Sequence[int], page_size: int, *, pages: int = 0, seed: int = 0
) -> StaticBatch:
    """The same metadata over a cache whose site 1 holds the keys in pages of chance; all other cells hold NaN."""
    need = [-(-n // page_size) for n in k_lens]
    pages = pages or sum(need) + 2
    ids = list(range(1, pages))
    random.Random(seed).shuffle(ids)
    columns = -(-max(static.max_k, *k_lens) // page_size)
    table = torch.zeros(static.slots, columns, dtype=torch.int32)
    k, v = (t.new_full((pages, page_size, *t.shape[1:]), NAN) for t in (inputs.k, inputs.v))
    start = 0
    for request, (n, count) in enumerate(zip(k_lens, need, strict=True)):
        table[request, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        at = torch.arange(n)
        page, offset = table[request][at // page_size].long().to(k.device), (at % page_size).to(k.device)
        k[page, offset], v[page, offset] = inputs.k[start : start + n], inputs.v[start : start + n]
        start += n
    cache: Any = SimpleNamespace(k=(None, k), v=(None, v), page_size=page_size, pages=pages)
    return replace(static, cache=cache, page_table=table.to(k.device))


@dataclass(frozen=True)
class Work:
    """A batch, all of it on the device already, and the oracle's answer."""

    batch: PrefillBatch
    static: StaticBatch
    inputs: Inputs
    want: Tensor


class Bucket:
    """Static buffers of one bucket, and its graph once it is captured.  Site 1 of a cache, if it has pages."""

    FIELDS = ("cu_q", "cu_k", "q_lens", "k_lens", "pad_cu_q", "pad_cu_k", "num_real_tokens")

    def __init__(
        self, backend: AttentionBackend, site: AttentionSite, *, tokens: int = 64, slots: int = 16, page_size: int = 0,
        max_k: int = 512,
    ) -> None:  # fmt: skip
        self.backend, self.site = backend, replace(site, index=1)
        self.tokens, self.slots, self.page_size = tokens, slots, page_size
        self.max_k = max_k if page_size else tokens
        self.live = self.work([tokens])
        self.graph = torch.cuda.CUDAGraph()
        self.out = torch.empty(0)

    def work(self, q_lens: Sequence[int], k_lens: Sequence[int] | None = None, seed: int = 0) -> Work:
        q_lens, k_lens = list(q_lens), list(q_lens if k_lens is None else k_lens)
        rows = self.slots * self.max_k if self.page_size else self.tokens
        inputs = inputs_for(self.site, self.tokens, rows, device="cuda", seed=seed)
        want = expected(self.site, inputs, q_lens, k_lens)
        poison_tail(inputs, sum(q_lens), sum(k_lens), NAN)
        static = static_batch(
            q_lens, k_lens, tokens=self.tokens, slots=self.slots, max_k=self.max_k, device=torch.device("cuda", 0)
        )
        if self.page_size:
            pages = 1 + self.slots * -(-self.max_k // self.page_size)
            static = in_pages(static, inputs, k_lens, self.page_size, pages=pages, seed=seed)
            inputs = replace(inputs, k=inputs.k[: self.tokens] * NAN, v=inputs.v[: self.tokens] * NAN)
        return Work(host_batch(q_lens, k_lens), static, inputs, want)

    def stage(self, work: Work) -> None:
        """Copies on the device, and the plan; nothing that waits."""
        names = (*self.FIELDS, "page_table") if self.page_size else self.FIELDS
        pairs = [(getattr(self.live.static, name), getattr(work.static, name)) for name in names]
        pairs += zip(self.live.inputs.tensors(), work.inputs.tensors(), strict=True)
        if self.page_size:
            here, there = self.live.static.cache, work.static.cache
            assert here is not None and there is not None
            pairs += [(here.k[1], there.k[1]), (here.v[1], there.v[1])]
        for to, source in pairs:
            if to is not None:
                to.copy_(source)
        self.backend.plan(work.batch, self.live.static, (self.site,))

    def run(self) -> Tensor:
        return self.backend.run(*self.live.inputs.tensors(), self.site, self.live.static)

    def capture(self, work: Work | None = None) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.stage(work or self.live)
                self.run()
            self.stage(work or self.live)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=stream):
                self.out = self.run()
        torch.cuda.synchronize()

    def replay(self, work: Work) -> Tensor:
        """The answer, in memory of its own; not waited for."""
        self.out.fill_(NAN)
        self.stage(work)
        self.graph.replay()
        return self.out.clone()


def check(got: Tensor, work: Work, bound: float = 2e-2) -> None:
    """Real rows equal the oracle's, padded rows are zeros."""
    torch.testing.assert_close(got.double(), work.want, atol=bound, rtol=bound)
    assert (got[work.batch.tokens :] == 0).all()


def queued_equal_one_by_one(bucket: Bucket, works: Sequence[Work]) -> None:
    """The host stages all batches while the device is still busy with something else."""
    alone = []
    for work in works:
        alone.append(bucket.replay(work))
        torch.cuda.synchronize()
        check(alone[-1], work)
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    queued = [bucket.replay(work) for work in works]
    assert not busy.query(), "the host was slower than the kernel that it should run ahead of, or it waited"
    torch.cuda.synchronize()
    for one, other in zip(alone, queued, strict=True):
        assert torch.equal(one, other)
