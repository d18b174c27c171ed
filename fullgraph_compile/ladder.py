"""Token buckets: the default ladder, which of them are legal, and the batch that a bucket is captured with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def default_ladder(max_tokens: int) -> tuple[int, ...]:
    """8, 16, 32, 64, 96, 128, 192, 256, then every 128; ``max_tokens`` is always the last.

    The cost of a forward is flat from 8 to 64 tokens and steps up at the tile sizes above it, so that few buckets
    lose little to padding.
    """
    steps = [8, 16, 32, 64, 96, 128, 192, 256, *range(384, max_tokens, 128)]
    return (*(s for s in steps if s < max_tokens), max_tokens)


def check_buckets(buckets: Any) -> tuple[int, ...]:
    """The buckets, sorted and without repeats.

    Raises:
        TypeError: not a sequence of integers.
        ValueError: empty, or a bucket below 1.
    """
    if isinstance(buckets, (str, bytes)) or not isinstance(buckets, Sequence):
        raise TypeError(f"buckets={buckets!r} must be a list of positive integers, or None for the default ladder")
    if not buckets:
        raise ValueError("buckets=[] is empty; give at least one token count, or None for the default ladder")
    for b in buckets:
        if isinstance(b, bool) or not isinstance(b, int):
            raise TypeError(f"buckets holds {b!r}, which is not an integer; buckets are token counts")
        if b < 1:
            raise ValueError(f"buckets holds {b}; a bucket is a positive token count")
    return tuple(sorted(set(buckets)))


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
