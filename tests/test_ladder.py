"""Ladders cover every count up to max_tokens, and every bucket is captured with a legal batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fullgraph_compile.ladder import capture_lengths, default_ladder, legal_buckets, slots_of


def test_b62_the_ladder_ends_at_max_tokens() -> None:
    for most in range(1, 201):
        ladder = default_ladder(most)
        assert ladder[-1] == most
        assert list(ladder) == sorted(set(ladder))
    assert default_ladder(70) == (8, 16, 32, 64, 70)


def test_b54_a_bucket_above_the_context_length_is_captured_as_several_requests() -> None:
    assert capture_lengths(16, context_length=8, slots=4) == [8, 8]
    assert capture_lengths(9, context_length=8, slots=4) == [5, 4]
    assert capture_lengths(16, context_length=8, slots=1) is None
    assert legal_buckets((4, 8, 16), context_length=8, slots=1) == (4, 8)
    assert legal_buckets((16, 32), context_length=8, slots=1) == ()


@given(bucket=st.integers(1, 4096), context_length=st.integers(1, 4096), slots=st.integers(1, 256))
def test_capture_lengths_are_the_fewest_legal_requests(bucket: int, context_length: int, slots: int) -> None:
    lengths = capture_lengths(bucket, context_length, slots)
    if lengths is None:
        assert bucket > context_length * slots_of(bucket, slots)
        return
    assert sum(lengths) == bucket
    assert min(lengths) >= 1
    assert max(lengths) <= context_length
    assert len(lengths) <= slots_of(bucket, slots)
    assert (len(lengths) - 1) * context_length < bucket, "fewer requests would do"
