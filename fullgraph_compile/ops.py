"""The op that stands for attention in a traced graph, and the facts of one call to it.

``full_prefill::attention`` is the only thing that a pass needs to know about attention.  Each call to it in a
traced graph is a *site*.  The op returns its output (never mutates an argument), so that functionalisation has
nothing to rewrite; the KV cache and the metadata of the batch are not arguments but belong to the active batch.

Layouts (all contiguous in the last dim):

    q       [tokens, heads, head_size]
    k       [tokens, kv_heads, head_size]
    v       [tokens, kv_heads, value_head_size]
    sinks   [heads] or None        one extra logit per head that takes part in the softmax and carries no value
    slopes  [heads] or None        ALiBi: slope * (key position - query position) is added to the scaled score
    scale   factor of the scores
    left    keys that a query sees to its left, besides its own position; -1 = all
    right   keys that a query sees to its right; 0 = causal, -1 = all
    softcap scores s become softcap * tanh(s / softcap); 0.0 = off
    site    index into the sites of the compiled body; -1 until ``mark_attention`` has numbered it
    ->      [tokens, heads, value_head_size], contiguous; rows past the real total are zeros

``full_prefill::hosted_attention`` stands for a call to the attention of an engine that runs the body itself and
captures it (SGLang).  Nothing of what it computes is known, only its shapes; rows past the real total hold anything.

    q, k, v  [tokens, ...]; k and v may be None
    others   further tensors of the call, each with one row a token or the same for all tokens
    facts    what else the call was given, as text
    width    elements of an output row
    site     which attention module was called; each module has its own number
    ->       [tokens, width]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("full_prefill", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? slopes, float scale, int left, int right, "
    "float softcap, int site) -> Tensor"
)
_library.define(
    "hosted_attention(Tensor q, Tensor? k, Tensor? v, Tensor[] others, str facts, int width, int site) -> Tensor"
)

attention = torch.ops.full_prefill.attention.default
hosted_attention = torch.ops.full_prefill.hosted_attention.default

SITE_OPS = frozenset({attention, hosted_attention})
"""The ops that stand for attention; the last argument of each is the site."""


def operands(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors among the arguments of a call to one of ``SITE_OPS``, in order; None where one is absent."""
    if isinstance(args[3], (list, tuple)):
        return (*args[:3], *args[3])
    return args[:5]


@dataclass(frozen=True)
class AttentionSite:
    """What one attention call computes, read from the traced call.

    ``node`` and ``module`` name it for people; nothing is keyed by a layer number.
    """

    index: int
    node: str
    module: str
    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    scale: float
    left: int = -1
    right: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def mask(self) -> str:
        """The mask in words: causal, causal window of 4, two-sided, two-sided window of 3+3."""
        if self.right == 0:
            return "causal" if self.left < 0 else f"causal window of {self.left + 1}"
        if self.left < 0 and self.right < 0:
            return "two-sided"
        return f"two-sided window of {self.left}+{self.right}"


@torch.library.register_fake("full_prefill::attention", lib=_library)
def _attention_fake(
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
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.register_fake("full_prefill::hosted_attention", lib=_library)
def _hosted_attention_fake(
    q: Tensor, k: Tensor | None, v: Tensor | None, others: list[Tensor], facts: str, width: int, site: int
) -> Tensor:
    dtype = q.dtype if v is None else v.dtype
    # Attention over eight-bit keys answers in bfloat16.
    return q.new_empty(q.shape[0], width, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)


Attend = Callable[..., Tensor]
"""(q, k, v, sinks, slopes, scale, left, right, softcap, site) -> [tokens, heads, value_head_size]."""

_direct: Attend | None = None


def set_direct_attention(attend: Attend) -> None:
    """Name what the op computes when it is called outside of a compiled body (priming, self-checks, tests)."""
    global _direct
    _direct = attend


def direct_attention() -> Attend:
    """What the op computes outside of a compiled body."""
    if _direct is None:
        raise RuntimeError("full_prefill::attention was called before fullgraph_compile.attention was imported")
    return _direct


def _attention(*args: object) -> Tensor:
    # It computes in the dtype of its operands, whatever the caller's autocast is.
    with torch._C._DisableAutocast():
        return direct_attention()(*args)


_library.impl("attention", _attention, "CompositeExplicitAutograd")


def _no_host(*args: object) -> Tensor:
    raise RuntimeError("full_prefill::hosted_attention is called by the body that its engine captures, nowhere else")


_host: Attend = _no_host


def _hosted_attention(*args: object) -> Tensor:
    return _host(*args)


_library.impl("hosted_attention", _hosted_attention, "CompositeExplicitAutograd")
