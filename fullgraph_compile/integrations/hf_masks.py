"""What the masks of a transformers model hide at distances that no small call has, asked of what makes them.

transformers makes masks from functions of a query's and a key's place.  Under a name of our own they are kept, and each
attention call is compared with the function of the mask that it got: a chunk of 8192 tokens shows in no short call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.hf_attention import attention_function, sides
from fullgraph_compile.integrations.plain import NotServed

# An attention implementation whose masks are kept.
MASKS = "full_prefill_masks"
# Queries at which masks are compared, with all keys up to a few beyond: at and around the sizes that models use.
_QUERIES = (
    0,
    1,
    5,
    127,
    128,
    300,
    511,
    512,
    1024,
    2047,
    2048,
    3000,
    4095,
    4096,
    8191,
    8192,
    16384,
    40000,
    65543,
    131072,
)
_BEYOND = 4


@dataclass
class Masks:
    """Masks that were made, each with the function that made it, and what calls differed from theirs."""

    made: list[tuple[Tensor, Callable[..., Any]]] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)


_masks: ContextVar[Masks | None] = ContextVar("masks", default=None)


def register() -> None:
    """Make the implementation known to transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(MASKS, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(MASKS, _mask)


@contextmanager
def keeping_masks() -> Iterator[Masks]:
    """Within it, masks and calls of the implementation ``MASKS`` are noted."""
    masks = Masks()
    token = _masks.set(masks)
    try:
        yield masks
    finally:
        _masks.reset(token)


def _mask(*args: Any, mask_function: Callable[..., Any] | None = None, **kwargs: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    if mask_function is None:
        return None
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(*args, mask_function=mask_function, **{**kwargs, **skips})
    masks = _masks.get()
    if masks is not None and isinstance(mask, Tensor):
        masks.made.append((mask, mask_function))
    return mask


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any,
               **kwargs: Any) -> Any:  # fmt: skip
    masks = _masks.get()
    if masks is not None and isinstance(attention_mask, Tensor):
        storage = attention_mask.untyped_storage().data_ptr()
        for mask, function in masks.made:
            if mask.untyped_storage().data_ptr() == storage:
                left, right = sides(module, kwargs.get("sliding_window"), kwargs.get("is_causal"))
                difference = _difference(function, left, right, mask.device)
                if difference:
                    masks.differs.append(f"{type(module).__name__}'s mask: {difference}")
                break
    return attention_function(module, query, key, value, None, *args, **kwargs)


def check_masks(masks: Masks, name: str) -> None:
    """Raise ``NotServed`` if a call was not what its mask is."""
    if masks.differs:
        raise NotServed(Reason.ATTENTION, f"{name} masks by more than its attention calls say: {masks.differs[0]}")


def _difference(function: Callable[..., Any], left: int, right: int, device: torch.device) -> str:
    """Where a mask is not that of a window; empty if nowhere that was looked at."""
    if any(tensor.dim() > 1 for tensor in _tensors(function, set())):
        # It looks a place up in a table of the small call: nothing beyond that can be asked.
        return ""
    zero = torch.zeros((), dtype=torch.long, device=device)
    for query in _QUERIES:
        keys = torch.arange(query + _BEYOND, device=device)
        seen = function(zero, zero, torch.tensor(query, device=device), keys)
        expected = torch.ones_like(keys, dtype=torch.bool)
        if left >= 0:
            expected &= keys >= query - left
        if right >= 0:
            expected &= keys <= query + right
        wrong = (torch.as_tensor(seen, device=device) != expected).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return f"query {query} {'does not see' if bool(expected[at]) else 'sees'} key {at}"
    return ""


def _tensors(function: Any, known: set[int]) -> Iterator[Tensor]:
    """Tensors that a function of functions holds."""
    if id(function) in known:
        return
    known.add(id(function))
    if isinstance(function, Tensor):
        yield function
    elif isinstance(function, (tuple, list)):
        for part in function:
            yield from _tensors(part, known)
    elif callable(function):
        for cell in getattr(function, "__closure__", None) or ():
            yield from _tensors(cell.cell_contents, known)
