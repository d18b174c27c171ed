"""What the conformance battery tries: the batches of each probe, and what a fault would answer instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fullgraph_compile.attention.dense import Operands
from fullgraph_compile.ops import AttentionSite

# The bucket that trials play in: longer than one tile of keys, and no multiple of one.
TOKENS, SLOTS, MAX_K = 160, 8, 320

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Batch:
    """Requests of one call.

    Attributes:
        new: new tokens of each.
        cached: cached tokens of each; none = 0 of all, as in all batches of a layout without a cache.
        shared: cached tokens that all requests have in common, in the same pages as far as these are whole.
    """

    new: tuple[int, ...]
    cached: tuple[int, ...] = ()
    shared: int = 0

    def __str__(self) -> str:
        return f"{list(self.new)} new tokens" + (f" after {list(self.cached)} cached" if any(self.cached) else "")

    def keys(self) -> tuple[int, ...]:
        """Cached and new tokens of each request."""
        return tuple(n + c for n, c in zip(self.new, self.cached or (0,) * len(self.new), strict=True))


Drop = Callable[[AttentionSite, Operands], "tuple[AttentionSite, Operands]"]
"""The site and the operands (of one request) as a backend takes them that does not know a feature."""


@dataclass(frozen=True)
class Trial:
    """One recording and the batches that it replays.

    Attributes:
        batches: replayed in this order, each with values of its own.
        captured: what the metadata holds while it is recorded.
        sites: the calls in the graph: for each, what differs from the base site.
        without: the answer from which the first call's must differ.
        buckets: token buckets, all recorded with one backend; a batch replays the smallest that it fits.
        padding: what rows past the real total, and cells of the cache that no request reads, hold; None = numbers
            like all others.
        around: what lies around each vector of the metadata: "sentinel", "impossible" or "plausible" values.
        zeros: whether padded rows of the output are looked at.
        page_size: tokens of a page; None = the layout's usual one, if it has pages.
        exact: no recording: metadata of the exact size for each batch, as for calls that replay no graph.
        apart: rows of q, k and v lie apart in memory, as those of a fused projection do.
    """

    batches: tuple[Batch, ...]
    captured: Batch = Batch((TOKENS,), (MAX_K - TOKENS,))
    sites: tuple[Mapping[str, Any], ...] = ({},)
    without: Drop | None = None
    buckets: tuple[int, ...] = (TOKENS,)
    padding: float | None = None
    around: str = "sentinel"
    zeros: bool = False
    page_size: int | None = None
    exact: bool = False
    apart: bool = False

    def sites_for(self, base: AttentionSite) -> list[AttentionSite]:
        return [replace(base, index=i, node=f"call {i}", **changes) for i, changes in enumerate(self.sites)]


@dataclass(frozen=True)
class Probe:
    """Trials that show one kind of fault.  A trial whose sites the backend does not support is left out.

    Attributes:
        name: what a person reads.
        trials: played in this order, up to the first that is wrong.
        layouts: where it is played: keys as arguments ("packed"), keys in a cache ("paged").
    """

    name: str
    trials: tuple[Trial, ...]
    layouts: tuple[str, ...] = ("packed", "paged")


# -- batches -----------------------------------------------------------------------------------------------------------

# Two batches that fill the bucket: with the fewest requests, and with all slots live.
FEW = Batch((TOKENS,), (MAX_K - TOKENS,))
MANY = Batch((TOKENS // SLOTS,) * SLOTS, (9, 0, 64, 1, 16, 15, 17, 130))

_A, _B = Batch((20, 50, 30), (33, 0, 5)), Batch((50, 30, 20), (0, 70, 16))
# Longer than the windows below, beginning and ending within tiles, and one token alone.
_MIXED = (Batch((20, 1, 33), (7, 150, 0)), Batch((70, 9, 2, 64), (0, 16, 31, 100)))

_MECHANICS = (
    Probe(
        "empty slots",
        (
            Trial(
                (
                    Batch((5, 0, 9, 0, 0, 40), (3, 30, 70, 0, 17, 130)),
                    Batch((0, 0, 7, 1), (0, 0, 12, 64)),
                    MANY,
                    Batch((0,)),
                    Batch((0,) * 7 + (33,), (0, 40) * 4),
                )
            ),
        ),
    ),
    Probe(
        "offsets that end early",
        tuple(
            Trial((Batch((5,), (20,)), Batch((1,)), Batch((90, 60), (0, 33)), Batch((3, 3, 3), (1, 2, 3))), sites=(s,))
            for s in ({}, {"right": -1})
        ),
    ),
    Probe("changed lengths", (Trial((_A, _B, _A, Batch((100,), (38,)), _A)),)),
    Probe("short after long", (Trial((FEW, Batch((3,), (2,)), Batch((1,)), Batch((30, 4), (64, 1)), FEW)),)),
    Probe(
        "long after short",
        (Trial((Batch((3,)), FEW, Batch((1, 1, 1), (1, 1, 1)), Batch((100, 60), (200, 0))), captured=MANY),),
    ),
    Probe("one token each", (Trial((Batch((1,) * SLOTS, (0, 5, 15, 16, 17, 63, 64, 200)), Batch((1, 1), (90, 0)))),)),
    Probe("NaN in tails", tuple(Trial((_A, Batch((7,), (20,)), _B), padding=x) for x in (NAN, INF))),
    Probe(
        "padded rows are zeros",
        tuple(Trial((_A, Batch((7,), (20,)), Batch((0,)), _B), padding=x, zeros=True) for x in (None, NAN)),
    ),
    Probe(
        "several buckets", (Trial((_A, Batch((9, 20), (31, 0)), _B, Batch((32,), (64,)), _A), buckets=(TOKENS, 32)),)
    ),
    Probe(
        "several sites",
        (
            Trial((_A, _B), sites=({}, {})),
            Trial((_A, _B), sites=({}, {"scale": 0.3})),
            Trial((_A, _B), sites=({}, {"heads": 8, "kv_heads": 2}, {})),
        ),
    ),
    Probe("exact sizes, no graph", (Trial((_A, Batch((1,), (33,)), Batch((5, 0, 3)), MANY, FEW), exact=True),)),
    Probe("rows apart in memory", (Trial((_A, _B), apart=True),)),
)

_PAGES = (
    Probe(
        "prefixes",
        (Trial((Batch((3, 6, 1, 4), (13, 0, 40, 150)), Batch((20,), (37,)), Batch((64, 64), (64, 128)))),),
        ("paged",),
    ),
    Probe("other pages, same lengths", (Trial((_A, _A, _A)),), ("paged",)),
    Probe(
        "shared prefix pages",
        (Trial((Batch((5, 9, 2), (256, 300, 270), shared=256), Batch((40, 40), (256, 256), shared=256))),),
        ("paged",),
    ),
    *(
        Probe(f"pages of {n} token{'s' * (n > 1)}", (Trial((_A, MANY, _B, FEW), page_size=n),), ("paged",))
        for n in (1, 7, 16, 32, 64, 128, 256)
    ),
)  # fmt: skip


# -- features ----------------------------------------------------------------------------------------------------------


def _site(**changes: Any) -> Drop:
    """The same operands, taken as those of another site."""
    return lambda site, operands: (replace(site, **changes), operands)


def _no_sinks(site: AttentionSite, operands: Operands) -> tuple[AttentionSite, Operands]:
    return site, replace(operands, sinks=None)


def _no_slopes(site: AttentionSite, operands: Operands) -> tuple[AttentionSite, Operands]:
    return site, replace(operands, slopes=None)


def _no_groups(site: AttentionSite, operands: Operands) -> tuple[AttentionSite, Operands]:
    """Key rows read as if there were as many key heads as query heads."""
    at = torch.arange(operands.k.shape[0] * site.heads) % (operands.k.shape[0] * site.kv_heads)
    k, v = (t.flatten(0, 1)[at].unflatten(0, (-1, site.heads)) for t in (operands.k, operands.v))
    return replace(site, kv_heads=site.heads), replace(operands, k=k, v=v)


def _equal_sizes(site: AttentionSite, operands: Operands) -> tuple[AttentionSite, Operands]:
    """Key and value heads both taken to be of the smaller size; what is missing of a value is zero."""
    size, missing = min(site.head_size, site.value_head_size), max(0, site.value_head_size - site.head_size)
    v = torch.nn.functional.pad(operands.v[..., : site.value_head_size - missing], (0, missing))
    return site, replace(operands, q=operands.q[..., :size], k=operands.k[..., :size], v=v)


_CAUSAL, _ALL = _site(left=-1, right=0), _site(left=-1, right=-1)


def _sizes(head_size: int, value_head_size: int) -> dict[str, Any]:
    return {"head_size": head_size, "value_head_size": value_head_size}


# name -> what a site has that has the feature (the alternatives, of which a backend may support some), and what it is
# without.
FEATURES: Mapping[str, tuple[tuple[Mapping[str, Any], ...], Drop]] = {
    "causal": (({},), _ALL),
    "two-sided": (({"right": -1},), _CAUSAL),
    "window": (({"left": 7}, {"left": 0}), _CAUSAL),
    "two-sided window": (({"left": 5, "right": 3},), _ALL),
    "custom scale": (({"scale": 0.3},), lambda site, operands: (replace(site, scale=site.head_size**-0.5), operands)),
    "soft cap": (({"softcap": 0.7},), _site(softcap=0.0)),
    "sinks": (({"sinks": True},), _no_sinks),
    "ALiBi slopes": (({"slopes": True}, {"slopes": True, "right": -1}), _no_slopes),
    "GQA": (({"kv_heads": 2}, {"heads": 6, "kv_heads": 2}, {"heads": 16, "kv_heads": 2}), _no_groups),
    "MQA": (({"kv_heads": 1},), _no_groups),
    "smaller value heads": ((_sizes(128, 64), _sizes(192, 128), _sizes(64, 32), _sizes(96, 64)), _equal_sizes),
    "larger value heads": ((_sizes(64, 128), _sizes(32, 64)), _equal_sizes),
}

# What "features together" joins, as far as the backend supports them together.
TOGETHER: tuple[Mapping[str, Any], ...] = (
    {"kv_heads": 2}, {"scale": 0.2}, {"softcap": 2.0}, {"left": 40}, {"sinks": True}, {"slopes": True},
)  # fmt: skip

_FEATURES = tuple(
    Probe(name, tuple(Trial(_MIXED, sites=(site,), without=without) for site in sites))
    for name, (sites, without) in FEATURES.items()
)
_HEAD_SIZES = tuple(
    Probe(f"heads of {n}", (Trial(_MIXED[1:], sites=({**_sizes(n, n), "scale": n**-0.5},)),))
    for n in (16, 32, 64, 80, 96, 128, 192, 256)
)


def probes(supports: Callable[[Mapping[str, Any]], bool], dtypes: tuple[torch.dtype, ...]) -> tuple[Probe, ...]:
    """All probes of the battery.

    Args:
        supports: whether the backend serves the base site with these changes.
        dtypes: further ones to try.
    """
    joined: dict[str, Any] = {}
    for changes in TOGETHER:
        if supports({**joined, **changes}):
            joined |= changes
    together = Probe("features together", (Trial(_MIXED, sites=(joined,)),))
    others = tuple(Probe(str(d).removeprefix("torch."), (Trial(_MIXED, sites=({"dtype": d},)),)) for d in dtypes)
    # What reads past the metadata may end the process's use of a GPU: last.
    around = tuple(Trial((_A, Batch((7,)), _B), around=x, zeros=True) for x in ("plausible", "impossible"))
    return (
        *_MECHANICS, *_FEATURES, together, *_HEAD_SIZES, *others, *_PAGES, Probe("metadata tails", around),
    )  # fmt: skip
