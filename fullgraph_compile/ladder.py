"""Token buckets: the default ladder, which of them are legal, and the batch that a bucket is captured with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

MEASURED = "measured"

# Activations of more rows fit no GPU, and each bucket is a graph.
MOST_TOKENS = 2**20

# What weights may add up to: what is computed from them is then finite too.
_MOST_WEIGHT = 1e300


def default_ladder(max_tokens: int) -> tuple[int, ...]:
    """8, 16, 32, 64, 96, 128, 192, 256, then every 128; ``max_tokens`` is always the last.

    The cost of a forward is flat from 8 to 64 tokens and steps up at the tile sizes above it, so that few buckets
    lose little to padding.
    """
    steps = [8, 16, 32, 64, 96, 128, 192, 256, *range(384, max_tokens, 128)]
    return (*(s for s in steps if s < max_tokens), max_tokens)


def check_buckets(buckets: Any) -> tuple[int, ...]:
    """The buckets, sorted and without repeats.

    Args:
        buckets: a sequence, an array or a tensor of integers.

    Raises:
        TypeError: something else.
        ValueError: empty, or a bucket below 1 or above ``MOST_TOKENS``.
    """
    buckets = _listed(buckets)
    if isinstance(buckets, (str, bytes)) or not isinstance(buckets, Sequence):
        raise TypeError(
            f"buckets={buckets!r} must be a list of positive integers, {MEASURED!r}, or None for the default ladder"
        )
    if not buckets:
        raise ValueError("buckets=[] is empty; give at least one token count, or None for the default ladder")
    for b in buckets:
        if not _is_integer(b):
            raise TypeError(f"buckets holds {b!r}, which is not an integer; buckets are token counts")
        if not 1 <= b <= MOST_TOKENS:
            raise ValueError(f"buckets holds {b}; a bucket is a positive token count, at most {MOST_TOKENS}")
    return tuple(sorted({int(b) for b in buckets}))


def _listed(values: Any) -> Any:
    return values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_lengths(lengths: Any) -> tuple[tuple[int, float], ...]:
    """Token counts of the calls to expect, each once, ascending, with how often it comes.

    Args:
        lengths: counts, in a sequence, an array or a tensor, or a mapping of counts to weights, or pairs of the two.

    Raises:
        TypeError: something else.
        ValueError: empty, a count below 1, a weight that is not above 0, or weights of more than 1e300 in all.
    """
    lengths = _listed(lengths)
    what = "lengths must be a list of token counts, or a mapping of token counts to how often each comes"
    if isinstance(lengths, (str, bytes)) or not isinstance(lengths, (Mapping, Sequence)):
        raise TypeError(f"{what}; got {lengths!r}")
    given = [*lengths.items()] if isinstance(lengths, Mapping) else [*lengths]
    pairs = [pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, 1) for pair in given]
    if not pairs:
        raise ValueError(f"lengths is empty; {what}")
    found: Counter[int] = Counter()
    for tokens, weight in pairs:
        if not _is_integer(tokens) or not (_is_integer(weight) or isinstance(weight, float)):
            raise TypeError(f"{what}; got {(tokens, weight)!r}")
        if tokens < 1 or not 0 < weight <= _MOST_WEIGHT:
            raise ValueError(
                f"lengths holds {(tokens, weight)!r}; a token count is at least 1, its weight above 0 and at most "
                f"{_MOST_WEIGHT:g}"
            )
        found[int(tokens)] += weight if isinstance(weight, float) else int(weight)  # type: ignore[assignment]
    if not sum(found.values()) <= _MOST_WEIGHT:
        raise ValueError(f"the weights of lengths add up to more than {_MOST_WEIGHT:g}; give shares of the calls")
    return tuple(sorted(found.items()))


def slots_of(bucket: int, slots: int) -> int:
    """Request slots of one bucket: a request has at least one token, so a bucket never needs more slots than rows."""
    return min(bucket, slots)


def capture_lengths(bucket: int, context_length: int, slots: int) -> list[int] | None:
    """New tokens of the fewest legal requests that fill a bucket; None if no legal batch fills it.

    A captured graph runs once on this batch, so no request may be longer than ``context_length``, else its row of
    the page table would be read past the end.
    """
    requests = -(-bucket // context_length)
    if requests > slots_of(bucket, slots):
        return None
    short, longer = divmod(bucket, requests)
    return [short + 1] * longer + [short] * (requests - longer)


def legal_buckets(ladder: Sequence[int], context_length: int, slots: int) -> tuple[int, ...]:
    """The buckets of the ladder that a legal batch can fill."""
    return tuple(b for b in ladder if capture_lengths(b, context_length, slots) is not None)
