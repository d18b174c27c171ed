"""Attention backends that are wrong in one way each, always by a value and never by an exception."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend, Sentinel
from fullgraph_compile.attention.dense import Operands
from fullgraph_compile.attention.probes import FEATURES, Drop
from fullgraph_compile.attention.reference import attend, keys_given
from fullgraph_compile.ops import AttentionSite


class Sound(AttentionBackend):
    """Right; with hooks where the broken ones differ.  All keys that a request may have are gathered from its pages."""

    name: ClassVar[str] = "sound"
    sentinel: ClassVar[Sentinel] = Sentinel()
    paged: ClassVar[bool] = True

    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        return []

    def run(self, q, k, v, sinks, slopes, site, static):
        if getattr(static, "cache", None) is not None:
            k, v, static = self.gather(site, static)
        site, o, static = self.change(site, Operands(q, k, v, sinks, slopes), static)
        out = attend(
            o.q, keys_given(o.k, o.v, static), o.sinks, o.slopes,
            scale=site.scale, left=site.left, right=site.right, softcap=site.softcap, static=static,
        )  # fmt: skip
        return self.finish(out, o, static)

    def gather(self, site, static):
        cells = self.cells(static.cache, self.table(static)).flatten()
        slots, columns = static.page_table.shape
        starts = torch.arange(slots + 1, dtype=torch.int32, device=cells.device) * columns * static.cache.page_size
        k, v = (c.flatten(0, 1)[cells] for c in (static.cache.k[self.layer(site)], static.cache.v[self.layer(site)]))
        return k, v, replace(static, cu_k=starts)

    def table(self, static) -> Tensor:
        return static.page_table.long()

    def cells(self, cache, table: Tensor) -> Tensor:
        return table[:, :, None] * cache.page_size + torch.arange(cache.page_size, device=table.device)

    def layer(self, site) -> int:
        return site.index

    def change(self, site, operands, static):
        return site, operands, static

    def finish(self, out, operands, static):
        return out


# -- metadata ----------------------------------------------------------------------------------------------------------


class CompactsEmptySlots(Sound):
    def change(self, site, operands, static):
        order = torch.argsort((static.q_lens == 0).int(), stable=True)
        return site, operands, replace(static, k_lens=static.k_lens[order])


class ExtendsTheLastRequest(Sound):
    """The last request reaches to the end of the bucket, for keys."""

    def change(self, site, operands, static):
        more = static.tokens - static.cu_q[-1:]
        last = (static.cu_q[1:] == static.cu_q[-1]) & (static.q_lens > 0)
        cu_k = torch.cat([static.cu_k[:-1], static.cu_k[-1:] + more])
        lens = {"q_lens": static.q_lens + last * more, "k_lens": static.k_lens + last * more}
        return site, operands, replace(static, cu_k=cu_k, **lens)


class _Copies(Sound):
    """Keeps a copy of the key lengths for each bucket."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def copy(self, static) -> Tensor:
        key = static.k_lens.data_ptr()
        if key not in self.kept:
            self.kept[key] = (static, static.k_lens.clone())
        return self.kept[key][1]

    def change(self, site, operands, static):
        return site, operands, replace(static, k_lens=self.copy(static).clone())


class PlansOncePerTotal(_Copies):
    total = -1

    def plan(self, batch, static, sites):
        copy = self.copy(static)
        if batch.tokens != self.total:
            copy.copy_(static.k_lens)
        self.total = batch.tokens


class LengthsOnlyGrow(_Copies):
    def plan(self, batch, static, sites):
        copy = self.copy(static)
        copy.copy_(torch.maximum(copy, static.k_lens))


class FreezesMaxK(Sound):
    def __init__(self) -> None:
        self.longest: dict[int, tuple[Any, int]] = {}

    def plan(self, batch, static, sites):
        self.longest.setdefault(static.k_lens.data_ptr(), (static, batch.longest))

    def change(self, site, operands, static):
        longest = self.longest[static.k_lens.data_ptr()][1]
        return site, operands, replace(static, k_lens=static.k_lens.clamp(max=longest))


class DecodesWithoutTheNewKey(Sound):
    def change(self, site, operands, static):
        single = (static.q_lens.amax() <= 1).int()
        return site, operands, replace(static, k_lens=static.k_lens - single)


class KnowsOneBucket(Sound):
    first: Any = None

    def plan(self, batch, static, sites):
        self.first = self.first or static

    def change(self, site, operands, static):
        return site, operands, replace(self.first, cu_k=static.cu_k)


class KnowsOneSite(Sound):
    first: AttentionSite | None = None

    def change(self, site, operands, static):
        self.first = self.first or site
        return replace(site, scale=self.first.scale), operands, static


class TakesMaxQForTheRows(Sound):
    def finish(self, out, operands, static):
        rows = torch.arange(out.shape[0], device=out.device)
        return out.masked_fill((rows >= static.max_q)[:, None, None], 0.0)


class ReadsRowsBesideEachOther(Sound):
    def change(self, site, operands, static):
        q, k, v = (
            t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride())
            for t in (operands.q, operands.k, operands.v)
        )
        return site, replace(operands, q=q, k=k, v=v), static


class ReadsPastTheOffsets(Sound):
    """Zeroes what lies past an offset that is none."""

    def run(self, q, k, v, sinks, slopes, site, static):
        out = super().run(q, k, v, sinks, slopes, site, static)
        past = static.cu_q.as_strided((1,), (1,), static.cu_q.storage_offset() + static.slots + 1)
        rows = torch.arange(out.shape[0], device=out.device)
        live = (rows < past) & (rows >= static.cu_q[-1])
        return torch.where(live[:, None, None], torch.ones_like(out), out)


# -- padding -----------------------------------------------------------------------------------------------------------


class WeighsWhatIsUnseen(Sound):
    """Zero times a NaN is a NaN."""

    def finish(self, out, operands, static):
        return out + (operands.v * 0).sum().to(out.dtype)


class LeavesPaddedRows(Sound):
    def finish(self, out, operands, static):
        padded = torch.arange(out.shape[0], device=out.device) >= static.cu_q[-1]
        return torch.where(padded[:, None, None], torch.ones_like(out), out)


# -- features ----------------------------------------------------------------------------------------------------------


def drops(applies: Callable[[AttentionSite], bool], without: Drop) -> type[Sound]:
    """A backend that does not know a feature."""

    class Drops(Sound):
        def change(self, site, operands, static):
            return (*without(site, operands), static) if applies(site) else (site, operands, static)

    return Drops


_APPLIES: dict[str, Callable[[AttentionSite], bool]] = {
    "causal": lambda s: s.left < 0 and s.right == 0,
    "two-sided": lambda s: s.left < 0 and s.right < 0,
    "window": lambda s: s.left >= 0 and s.right == 0,
    "two-sided window": lambda s: s.left >= 0 and s.right > 0,
    "custom scale": lambda s: s.scale != s.head_size**-0.5,
    "soft cap": lambda s: s.softcap > 0,
    "sinks": lambda s: s.sinks,
    "ALiBi slopes": lambda s: s.slopes,
    "GQA": lambda s: 1 < s.kv_heads < s.heads,
    "MQA": lambda s: s.kv_heads == 1,
    "smaller value heads": lambda s: s.value_head_size < s.head_size,
    "larger value heads": lambda s: s.value_head_size > s.head_size,
}
DROPS = {name: drops(_APPLIES[name], without) for name, (_, without) in FEATURES.items()}


class DropsSlopesUnderACap(Sound):
    def change(self, site, operands, static):
        return site, replace(operands, slopes=None) if site.softcap else operands, static


class CutsOddHeads(Sound):
    def change(self, site, operands, static):
        whole = site.head_size & (site.head_size - 1) == 0
        return site, operands if whole else replace(operands, q=operands.q[..., :64], k=operands.k[..., :64]), static


class RoundsHalves(Sound):
    def finish(self, out, operands, static):
        return (out * 16).round() / 16 if out.dtype is torch.float16 else out


# -- pages -------------------------------------------------------------------------------------------------------------


class CausalFromTheFirstKey(Sound):
    """Query i sees keys 0 ... i, whatever is cached."""

    def change(self, site, operands, static):
        return site, operands, replace(static, q_lens=static.k_lens)


class PlansPagesOncePerLengths(Sound):
    lengths: Any = None

    def plan(self, batch, static, sites):
        if getattr(static, "cache", None) is None:
            return
        lengths = (batch.new_tokens, batch.cached_tokens)
        if self.lengths is None:
            self.own = static.page_table.clone()
        if lengths != self.lengths:
            self.own.copy_(static.page_table)
        self.lengths = lengths

    def table(self, static):
        return self.own.long()


class GivesAPageToOneRequest(Sound):
    def table(self, static):
        table = static.page_table.long()
        rows = torch.arange(table.shape[0], device=table.device)[:, None].expand_as(table).contiguous()
        owner = torch.zeros(static.cache.pages, dtype=torch.int64, device=table.device)
        owner = owner.scatter_reduce(0, table.flatten(), rows.flatten(), "amax")
        return table * (owner[table] == rows)


class ReadsSmallPages(Sound):
    def cells(self, cache, table):
        cells = super().cells(cache, table)
        return cells - (cells % cache.page_size > 127) * 128


class ReadsTheFirstSitesCache(Sound):
    def layer(self, site):
        return 0


# probe -> who fails it, and a probe that the same backend passes.
BROKEN: dict[str, tuple[type[Sound], str]] = {
    "empty slots": (CompactsEmptySlots, "changed lengths"),
    "offsets that end early": (ExtendsTheLastRequest, "changed lengths"),
    "changed lengths": (PlansOncePerTotal, "short after long"),
    "short after long": (LengthsOnlyGrow, "exact sizes, no graph"),
    "long after short": (FreezesMaxK, "short after long"),
    "one token each": (DecodesWithoutTheNewKey, "changed lengths"),
    "NaN in tails": (WeighsWhatIsUnseen, "changed lengths"),
    "padded rows are zeros": (LeavesPaddedRows, "NaN in tails"),
    "several buckets": (KnowsOneBucket, "changed lengths"),
    "several sites": (KnowsOneSite, "custom scale"),
    "exact sizes, no graph": (TakesMaxQForTheRows, "changed lengths"),
    "rows apart in memory": (ReadsRowsBesideEachOther, "changed lengths"),
    "metadata tails": (ReadsPastTheOffsets, "padded rows are zeros"),
    **{name: (kind, "two-sided" if name == "causal" else "causal") for name, kind in DROPS.items()},
    "features together": (DropsSlopesUnderACap, "ALiBi slopes"),
    "heads of 80": (CutsOddHeads, "heads of 256"),
    "float16": (RoundsHalves, "bfloat16"),
}
BROKEN_PAGED: dict[str, tuple[type[Sound], str]] = {
    "prefixes": (CausalFromTheFirstKey, "two-sided, paged"),
    "other pages, same lengths": (PlansPagesOncePerLengths, "changed lengths, paged"),
    "shared prefix pages": (GivesAPageToOneRequest, "prefixes"),
    "pages of 256 tokens": (ReadsSmallPages, "pages of 128 tokens"),
    "several sites, paged": (ReadsTheFirstSitesCache, "several sites"),
    "NaN in tails, paged": (WeighsWhatIsUnseen, "prefixes"),
    "window, paged": (DROPS["window"], "causal, paged"),
    "long after short, paged": (FreezesMaxK, "short after long, paged"),
}
