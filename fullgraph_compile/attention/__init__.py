"""The attention backends, and how one is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend, Sentinel
from fullgraph_compile.attention.flash_attn import FlashAttnBackend
from fullgraph_compile.attention.flashinfer import FlashInferAttention, FlashInferFA2, FlashInferFA3
from fullgraph_compile.attention.reference import ReferenceAttention, attend, keys_given
from fullgraph_compile.attention.triton import TritonAttention
from fullgraph_compile.attention.varlen import VarlenAttention
from fullgraph_compile.batch import StaticBatch, active_batch
from fullgraph_compile.ops import AttentionSite, set_direct_attention

__all__ = [
    "AttentionBackend",
    "Sentinel",
    "UnsupportedAttention",
    "attention_names",
    "create_attention",
    "direct_attention",
    "register",
]

AUTO = "auto"

# What "auto" tries on a device, fastest first.  The reference is no choice on CUDA: it would be right, but slower than
# the model that the user had.
PREFERENCE: Mapping[str, tuple[str, ...]] = {"cuda": (TritonAttention.name, VarlenAttention.name)}
_ANY_DEVICE = (ReferenceAttention.name,)

_backends: dict[str, type[AttentionBackend]] = {}


class UnsupportedAttention(ValueError):
    """No backend that may be taken supports every site.

    Attributes:
        requested: "auto" or the backend that was named.
        reasons: backend -> what it cannot do, site by site.
    """

    def __init__(self, requested: str, device: torch.device, reasons: Mapping[str, tuple[str, ...]]) -> None:
        self.requested = requested
        self.reasons = dict(reasons)
        said = "; ".join(f"{name} cannot serve {', nor '.join(why)}" for name, why in reasons.items())
        super().__init__(f"attention={requested!r} on {device}: {said}")


def register(name: str, backend: type[AttentionBackend]) -> None:
    """Make a backend known by name.  "auto" does not take it: its order is one of measured speed.

    Raises:
        TypeError: not a subclass of ``AttentionBackend``, or one without a sentinel.
        ValueError: the name is taken, or is not one.
    """
    if not isinstance(backend, type) or not issubclass(backend, AttentionBackend):
        raise TypeError(f"{backend!r} is not a subclass of AttentionBackend")
    if not isinstance(name, str) or not name or name == AUTO:
        raise ValueError(f"{name!r} cannot name an attention backend; give a word other than {AUTO!r}")
    if not isinstance(getattr(backend, "sentinel", None), Sentinel):
        raise TypeError(
            f"{backend.__name__} declares no sentinel; set `sentinel = Sentinel(...)` to what its unused request "
            "slots must hold"
        )
    if _backends.get(name, backend) is not backend:
        raise ValueError(f"attention backend {name!r} is taken by {_backends[name].__name__}")
    _backends[name] = backend


def attention_names() -> tuple[str, ...]:
    """What ``attention=`` takes."""
    return (AUTO, *sorted(_backends))


def create_attention(name: str, sites: Sequence[AttentionSite], device: torch.device) -> AttentionBackend:
    """The backend that serves all sites of a body on a device.

    Args:
        name: a registered name, or "auto": the fastest that supports every site.

    Raises:
        ValueError: no backend has this name.
        UnsupportedAttention: the named backend, or each one that "auto" may take, cannot serve a site.
    """
    if name != AUTO and name not in _backends:
        raise ValueError(f"attention={name!r} is not known; valid are {', '.join(map(repr, attention_names()))}")
    reasons: dict[str, tuple[str, ...]] = {}
    for candidate in PREFERENCE.get(device.type, _ANY_DEVICE) if name == AUTO else (name,):
        backend = _backends[candidate]()
        why = _unsupported(backend, sites, device)
        if not why:
            return backend
        reasons[candidate] = why
    raise UnsupportedAttention(name, device, reasons)


def _unsupported(backend: AttentionBackend, sites: Sequence[AttentionSite], device: torch.device) -> tuple[str, ...]:
    """Each reason once, with the first site that it holds for and how many more there are."""
    found: dict[str, list[AttentionSite]] = {}
    for site in sites:
        for reason in backend.supports(site, device):
            found.setdefault(reason, []).append(site)
    return tuple(f"{_named(of)}: {reason}" for reason, of in found.items())


def _named(sites: Sequence[AttentionSite]) -> str:
    first = sites[0]
    text = f"{first.module} ({first.node})" if first.module else first.node
    return f"{text} and {len(sites) - 1} more" if len(sites) > 1 else text


def direct_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    site: int,
) -> Tensor:
    """What the op computes outside of a compiled body: the requests of the active batch, else one of all rows.

    Raises:
        ValueError: the active batch does not describe these rows, or it has a KV cache, which only a compiled body
            reads.
    """
    q_lens, k_lens = [q.shape[0]], [k.shape[0]]
    batch = active_batch()
    if batch is not None and batch.cache is not None:
        raise ValueError(f"{batch!r} has a KV cache, but attention was called outside of a compiled body")
    if batch is not None:
        q_lens = list(batch.new_tokens)
        k_lens = [n + c for n, c in zip(batch.new_tokens, batch.cached_tokens, strict=True)]
        if (sum(q_lens), sum(k_lens)) != (q.shape[0], k.shape[0]):
            raise ValueError(
                f"attention got {q.shape[0]} query rows and {k.shape[0]} key rows, but {batch!r} has "
                f"{sum(q_lens)} new and {sum(k_lens) - sum(q_lens)} cached tokens"
            )
    static = _static_of(q_lens, k_lens, q.device)
    return attend(
        q, keys_given(k, v, static), sinks, slopes, scale=scale, left=left, right=right, softcap=softcap, static=static
    )


def _static_of(q_lens: list[int], k_lens: list[int], device: torch.device) -> StaticBatch:
    """Metadata at exact size, in memory of its own."""
    q, k = torch.tensor(q_lens, dtype=torch.int32), torch.tensor(k_lens, dtype=torch.int32)
    cu_q, cu_k = (torch.nn.functional.pad(t.cumsum(0, dtype=torch.int32), (1, 0)) for t in (q, k))
    vectors = {
        "cu_q": cu_q, "cu_k": cu_k, "q_lens": q, "k_lens": k, "pad_cu_q": torch.cat([cu_q, cu_q[-1:]]),
        "pad_cu_k": torch.cat([cu_k, cu_k[-1:]]), "num_real_tokens": cu_q[-1:],
    }  # fmt: skip
    bounds = {"tokens": sum(q_lens), "slots": len(q_lens), "max_q": max(2, *q_lens), "max_k": max(1, *k_lens)}
    return StaticBatch(**bounds, **{name: t.to(device) for name, t in vectors.items()})  # type: ignore[arg-type]


register(ReferenceAttention.name, ReferenceAttention)
register(TritonAttention.name, TritonAttention)
register(VarlenAttention.name, VarlenAttention)
for _kind in (FlashInferAttention, FlashInferFA2, FlashInferFA3, FlashAttnBackend):
    register(_kind.name, _kind)
set_direct_attention(direct_attention)
