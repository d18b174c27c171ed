"""Playing one trial of the conformance battery: static buffers, one recording, many replays, and a judgement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend
from fullgraph_compile.attention.dense import DISTINCT, TOLERANCE, Operands, dense
from fullgraph_compile.attention.probes import MAX_K, SLOTS, TOKENS, Batch, Trial
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.graphs import RecordedGraph, below, create_recorder
from fullgraph_compile.ops import AttentionSite

# Words around each vector of the metadata, which belong to no vector.
_AROUND = 3


def play(
    trial: Trial, backend: AttentionBackend, base: AttentionSite, device: torch.device, page_size: int | None
) -> str | None:
    """Play a trial; what was wrong in it, or None.  Exceptions of the backend pass through."""
    with torch.inference_mode(False), torch.no_grad():
        rig = _Rig(trial, backend, base, device, page_size)
        return rig.exact() if trial.exact else rig.replays()


@dataclass
class _Bucket:
    """The static buffers of one bucket, its graph, and what a run made last."""

    static: StaticBatch
    whole: dict[str, Tensor]
    inputs: list[Operands]
    outputs: list[Tensor]
    made: list[Tensor] = field(default_factory=list)
    graph: RecordedGraph | None = None


class _Rig:
    def __init__(
        self, trial: Trial, backend: AttentionBackend, base: AttentionSite, device: torch.device, page_size: int | None
    ) -> None:
        self.trial, self.backend, self.device = trial, backend, device
        self.sites = trial.sites_for(base)
        self.random = torch.Generator().manual_seed(0)
        self.page_size = page_size and (trial.page_size or page_size)
        self.max_k = MAX_K if self.page_size else TOKENS
        self.cache = self._cache(self.page_size) if self.page_size else None
        self.weights = [
            (self._normal(s.heads, dtype=s.dtype) if s.sinks else None,
             self._normal(s.heads, dtype=s.dtype).abs() + 0.1 if s.slopes else None)
            for s in self.sites
        ]  # fmt: skip

    # -- playing -------------------------------------------------------------------------------------------------

    def replays(self) -> str | None:
        recorder = create_recorder("cuda" if self.device.type == "cuda" else "tape", self.device)
        assert recorder is not None
        buckets = {n: self._bucket(n, min(SLOTS, n), self.max_k) for n in sorted(self.trial.buckets, reverse=True)}
        try:
            # The tape needs no session: to collect garbage takes longer than the rest.
            with recorder.session() if self.device.type == "cuda" else nullcontext():
                for warm_up in (True, False):
                    for tokens, bucket in buckets.items():
                        full = self.trial.captured if tokens == TOKENS else Batch((tokens,))
                        full = full if self.cache is not None else Batch(full.new)
                        self._stage(bucket, full)
                        if warm_up:
                            self._run(bucket)
                            self._run(bucket)
                        else:
                            bucket.graph = recorder.record(lambda b=bucket: self._run(b))  # type: ignore[misc]
                        wrong = self._malformed(bucket)
                        if wrong:
                            return wrong
            for i, batch in enumerate(self._batches()):
                bucket = buckets[min(n for n in buckets if n >= sum(batch.new))]
                rows = self._stage(bucket, batch)
                assert bucket.graph is not None
                bucket.graph.replay()
                wrong = self._wrong(bucket, batch, rows)
                if wrong:
                    return f"replay {i + 1}, {batch}: {wrong}"
        finally:
            recorder.close()
        return None

    def _batches(self) -> list[Batch]:
        return [batch if self.cache is not None else Batch(batch.new) for batch in self.trial.batches]

    def exact(self) -> str | None:
        for batch in self._batches():
            keys = batch.keys()
            bucket = self._bucket(sum(batch.new), len(batch.new), max(1, *keys), max_q=max(2, *batch.new))
            rows = self._stage(bucket, batch)
            for output in bucket.outputs:  # the allocator gives these bytes to the next tensor of that size
                torch.full_like(output, float("nan"))
            self._run(bucket)
            wrong = self._malformed(bucket) or self._wrong(bucket, batch, rows)
            if wrong:
                return f"at exact size, {batch}: {wrong}"
        return None

    def _run(self, bucket: _Bucket) -> None:
        bucket.made = []
        for site, i, output in zip(self.sites, bucket.inputs, bucket.outputs, strict=True):
            with below():
                result = self.backend.run(i.q, i.k, i.v, i.sinks, i.slopes, site, bucket.static)
            bucket.made.append(result)
            if result.shape == output.shape:
                output.copy_(result)

    # -- judging -------------------------------------------------------------------------------------------------

    def _malformed(self, bucket: _Bucket) -> str | None:
        for made, output in zip(bucket.made, bucket.outputs, strict=True):
            if made.shape != output.shape:
                return f"the output has shape {list(made.shape)} instead of {list(output.shape)}"
            if made.dtype != output.dtype:
                return f"the output is {made.dtype} instead of {output.dtype}"
            if not made.is_contiguous():
                return "the output is not contiguous"
        return None

    def _wrong(self, bucket: _Bucket, batch: Batch, rows: list[list[Operands]]) -> str | None:
        real = sum(batch.new)
        for site, output, requests in zip(self.sites, bucket.outputs, rows, strict=True):
            got = output.cpu().double()
            tolerance = TOLERANCE[site.dtype]
            want = torch.cat([dense(site, r) for r in requests])
            off = ~((got[:real] - want).abs() <= tolerance + tolerance * want.abs())  # a NaN is off
            dropped = self._dropped(site, requests)
            if off.any():
                text = _first(off, got, want, batch)
                same = dropped is not None and bool(((got[:real] - dropped).abs() <= 2 * tolerance).all())
                text += "; it is the answer without the feature" if same else ""
                return text if len(self.sites) == 1 else f"{site.node} of the graph, {text}"
            if dropped is not None and real and not (got[:real] - dropped).abs().max() > DISTINCT * tolerance:
                return "the answer is the same without the feature"
            left = got[real:]
            if self.trial.zeros and not bool((left == 0).all()):
                row = int((left != 0).flatten(1).any(1).nonzero()[0])
                return f"padded row {real + row} holds {float(left[row][left[row] != 0][0]):.4g} instead of zeros"
        return None

    def _dropped(self, site: AttentionSite, requests: list[Operands]) -> Tensor | None:
        if self.trial.without is None or site.index:
            return None
        return torch.cat([dense(*self.trial.without(site, r)) for r in requests])

    # -- buffers -------------------------------------------------------------------------------------------------

    def _normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.random).to(dtype)

    def _cache(self, page_size: int) -> Any:
        from fullgraph_compile.cache import PagedKVCache

        sizes = [(s.kv_heads, s.head_size, s.value_head_size) for s in self.sites]
        # Page 0 is nobody's, and the last one no request ever gets.
        pages = SLOTS * -(-MAX_K // page_size) + 2
        # Its allocator is left alone: which request has which page is up to the trial.
        return PagedKVCache(sizes, pages=pages, page_size=page_size, dtype=self.sites[0].dtype, device=self.device)

    def _bucket(self, tokens: int, slots: int, max_k: int, max_q: int | None = None) -> _Bucket:
        sizes = {
            "num_real_tokens": 1, "cu_q": slots + 1, "cu_k": slots + 1, "q_lens": slots, "k_lens": slots,
            "pad_cu_q": slots + 2, "pad_cu_k": slots + 2,
        }  # fmt: skip
        columns = -(-max_k // self.page_size) if self.page_size else 0
        dtypes = dict.fromkeys(sizes, torch.int32)
        if self.cache is not None:
            sizes |= {"page_table": slots * columns, "slot_ids": tokens}
            dtypes |= {"page_table": torch.int32, "slot_ids": torch.int64}
        whole = {
            name: torch.zeros(n + 2 * _AROUND, dtype=dtypes[name], device=self.device) for name, n in sizes.items()
        }
        views: dict[str, Any] = {name: t[_AROUND : t.numel() - _AROUND] for name, t in whole.items()}
        if self.cache is not None:
            views |= {"page_table": views["page_table"].view(slots, columns), "cache": self.cache}
        static = StaticBatch(tokens, slots, max_q or max(2, tokens), max_k, **views)
        inputs = [self._inputs(i, tokens) for i in range(len(self.sites))]
        outputs = [
            torch.zeros(tokens, s.heads, s.value_head_size, dtype=s.dtype, device=self.device) for s in self.sites
        ]
        return _Bucket(static, whole, inputs, outputs)

    def _inputs(self, index: int, tokens: int) -> Operands:
        s = self.sites[index]
        shapes = [(s.heads, s.head_size), (s.kv_heads, s.head_size), (s.kv_heads, s.value_head_size)]
        widths = [heads * size for heads, size in shapes]
        if self.trial.apart:
            parts = torch.zeros(tokens, sum(widths), dtype=s.dtype, device=self.device).split(widths, 1)
        else:
            parts = tuple(torch.zeros(tokens, width, dtype=s.dtype, device=self.device) for width in widths)
        q, k, v = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
        sinks, slopes = (None if t is None else t.to(self.device) for t in self.weights[index])
        return Operands(q, k, v, sinks, slopes)

    # -- staging -------------------------------------------------------------------------------------------------

    def _stage(self, bucket: _Bucket, batch: Batch) -> list[list[Operands]]:
        """Write a batch and values for it; the values of each site's requests, in fp64 on the CPU."""
        for tensor in (*bucket.made, *bucket.outputs):  # memory that a run must write in full
            tensor.fill_(float("nan"))
        keys = batch.keys()
        pages, slots = self._pages(batch, keys)
        self._write_metadata(bucket, batch, keys, pages, slots)
        rows = [self._write_values(i, bucket.inputs[i], batch, keys, slots) for i in range(len(self.sites))]
        more: dict[str, Any] = {"cache": self.cache, "pages": pages} if self.cache is not None else {}
        cached = [k - n for k, n in zip(keys, batch.new, strict=True)]
        self.backend.plan(PrefillBatch(list(batch.new), cached, device=self.device, **more), bucket.static, self.sites)
        return rows

    def _pages(self, batch: Batch, keys: Sequence[int]) -> tuple[list[list[int]], list[Tensor]]:
        """Pages of each request, in an order of chance, and the cell of the cache of each of its keys."""
        if self.cache is None or self.page_size is None:
            return [], []
        free = (torch.randperm(self.cache.pages - 2, generator=self.random) + 1).tolist()
        common = [free.pop() for _ in range(batch.shared // self.page_size)]
        pages, slots = [], []
        for n in keys:
            mine = common + [free.pop() for _ in range(-(-n // self.page_size) - len(common))]
            at = torch.arange(n)
            pages.append(mine)
            slots.append(torch.tensor(mine, dtype=torch.int64)[at // self.page_size] * self.page_size
                         + at % self.page_size)  # fmt: skip
        return pages, slots

    def _write_metadata(
        self, bucket: _Bucket, batch: Batch, keys: Sequence[int], pages: list[list[int]], slots: list[Tensor]
    ) -> None:
        static = bucket.static
        unused = [0] * (static.slots - len(keys))
        new, total = [*batch.new, *unused], [*keys, *unused]
        cu_q, cu_k = ([sum(lens[:i]) for i in range(len(lens) + 1)] for lens in (new, total))
        words = {
            "num_real_tokens": [cu_q[-1]], "cu_q": cu_q, "cu_k": cu_k, "q_lens": new, "k_lens": total,
            "pad_cu_q": [*cu_q, static.tokens], "pad_cu_k": [*cu_k, cu_k[-1]],
        }  # fmt: skip
        around = {"impossible": 2**30, "plausible": static.tokens}.get(self.trial.around)
        if self.cache is not None:
            columns = bucket.whole["page_table"][2 * _AROUND :].numel() // max(1, static.slots)
            table = [page for row in [*pages, *([] for _ in unused)] for page in [*row, *[0] * (columns - len(row))]]
            fresh = [int(s) for n, ids in zip(batch.new, slots, strict=True) for s in ids[len(ids) - n :]]
            words |= {"page_table": table, "slot_ids": [*fresh, *[0] * (static.tokens - len(fresh))]}
        for name, values in words.items():
            edge = (values[0], values[-1]) if values else (0, 0)
            if around is not None:
                # A page that does not exist would end the process on a GPU; one that nobody owns shows as well.
                other = {"page_table": self.cache.pages - 1, "slot_ids": 0} if self.cache is not None else {}
                edge = (other.get(name, around),) * 2
            bucket.whole[name].copy_(torch.tensor([*[edge[0]] * _AROUND, *values, *[edge[1]] * _AROUND]))

    def _write_values(
        self, index: int, inputs: Operands, batch: Batch, keys: Sequence[int], slots: list[Tensor]
    ) -> list[Operands]:
        site, total, real = self.sites[index], sum(keys), sum(batch.new)
        # Scores large enough that masks, caps and sinks matter.
        q = 2 * self._normal(real, site.heads, site.head_size, dtype=site.dtype)
        k = self._normal(total, site.kv_heads, site.head_size, dtype=site.dtype)
        v = self._normal(total, site.kv_heads, site.value_head_size, dtype=site.dtype)
        per_request = [list(t.split(list(lens))) for t, lens in ((q, batch.new), (k, keys), (v, keys))]
        for r in range(1, len(keys) if batch.shared else 0):
            for rows in per_request[1:]:
                rows[r][: batch.shared] = rows[0][: batch.shared]
        if self.cache is not None:
            for cache, rows in ((self.cache.k[index], per_request[1]), (self.cache.v[index], per_request[2])):
                cells = cache.view(-1, *cache.shape[2:])
                cells.copy_(self._unread(cells.shape, site.dtype))
                for ids, mine in zip(slots, rows, strict=True):
                    cells[ids.to(self.device)] = mine.to(self.device)
        fresh = [[x[len(x) - n :] for n, x in zip(batch.new, rows, strict=True)] for rows in per_request]
        for static, rows in zip((inputs.q, inputs.k, inputs.v), fresh, strict=True):
            static.copy_(torch.cat([*rows, self._unread((len(static) - real, *static.shape[1:]), site.dtype)]))
        sinks, slopes = self.weights[index]
        return [Operands(a, b, c, sinks, slopes).doubles() for a, b, c in zip(*per_request, strict=True)]

    def _unread(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.trial.padding is None:
            return self._normal(*shape, dtype=dtype)
        return torch.full(tuple(shape), self.trial.padding, dtype=dtype)


def _first(off: Tensor, got: Tensor, want: Tensor, batch: Batch) -> str:
    row, head, column = (int(x) for x in off.nonzero()[0])
    request = next(i for i in range(len(batch.new)) if row < sum(batch.new[: i + 1]))
    token = row - sum(batch.new[:request])
    return (
        f"request {request}, new token {token}, head {head}: {float(got[row, head, column]):.4g} instead of "
        f"{float(want[row, head, column]):.4g}, {int(off.flatten(1).any(1).sum())} of {len(want)} rows are wrong"
    )
