"""A bad option is an error that says what was wrong and what is valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fullgraph_compile import Options


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"bukets": [8]}, ValueError, "did you mean 'buckets'.*max_tokens, buckets, request_slots"),
        ({"nonsense": 1}, ValueError, "Valid options: max_tokens"),
        ({"buckets": []}, ValueError, "empty"),
        ({"buckets": [8, 0]}, ValueError, "holds 0"),
        ({"buckets": [8, -4]}, ValueError, "holds -4"),
        ({"buckets": [8, 16.0]}, TypeError, "16.0.*not an integer"),
        ({"buckets": [True]}, TypeError, "True"),
        ({"buckets": "measured!"}, TypeError, "list of positive integers"),
        ({"buckets": 16}, TypeError, "list of positive integers"),
        ({"lengths": [5]}, ValueError, "give buckets='measured'"),
        ({"buckets": "measured", "lengths": []}, ValueError, "lengths is empty"),
        ({"buckets": "measured", "lengths": [0]}, ValueError, "at least 1"),
        ({"buckets": "measured", "lengths": {5: -1}}, ValueError, "above 0"),
        ({"buckets": "measured", "lengths": ["5"]}, TypeError, "list of token counts"),
        ({"buckets": "measured", "lengths": 5}, TypeError, "list of token counts"),
        ({"buckets": "measured", "lengths": {30: True}}, TypeError, "list of token counts"),
        ({"buckets": "measured", "lengths": {30: 10**400}}, ValueError, "at most 1e\\+300"),
        ({"buckets": "measured", "lengths": {30: float("inf")}}, ValueError, "at most 1e\\+300"),
        ({"buckets": "measured", "lengths": dict.fromkeys((30, 31), 9e299)}, ValueError, "more than 1e\\+300"),
        ({"memory_budget": "9" * 400 + "GiB"}, ValueError, "9223372036854775807 bytes, which is the most"),
        ({"memory_budget": 10**400}, ValueError, "at most 9223372036854775807"),
        ({"memory_budget": "5 bananas"}, ValueError, "'300MB', '300MiB'"),
        ({"memory_budget": "MiB"}, ValueError, "'300MB', '300MiB'"),
        ({"memory_budget": 0}, ValueError, "memory_budget=0"),
        ({"memory_budget": 1.5}, TypeError, "memory_budget=1.5"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0"),
        ({"max_tokens": 10**13}, ValueError, "at most 1048576"),
        ({"buckets": [8, 10**13]}, ValueError, "at most 1048576"),
        ({"context_length": 2**31}, ValueError, "at most 2147483647"),
        ({"buckets": np.array([8.0, 16.0])}, TypeError, "8.0.*not an integer"),
        ({"buckets": np.array(8)}, TypeError, "list of positive integers"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens=2.5"),
        ({"max_tokens": 4, "buckets": [8, 16]}, ValueError, "below the smallest bucket, 8"),
        ({"max_tokens": 16, "request_slots": 17}, ValueError, "request_slots=17 is above max_tokens=16"),
        ({"request_slots": 0}, ValueError, "request_slots=0"),
        ({"context_length": -1}, ValueError, "context_length=-1"),
        ({"compiler": "gcc"}, ValueError, "'inductor', 'aot_eager', 'eager'"),
        ({"graphs": "vulkan"}, ValueError, "'auto', 'cuda', 'tape', 'none'"),
        ({"graphs": "tape"}, ValueError, "Inductor.*'aot_eager' or 'eager'"),
        ({"max_padding": 0.5}, ValueError, ">= 1"),
        ({"max_padding": float("nan")}, ValueError, ">= 1"),
        ({"max_padding": "2"}, TypeError, "number >= 1"),
        ({"unsafe": "ignore"}, ValueError, "'compiled', 'error'"),
        ({"strict": 1}, TypeError, "True or False"),
        ({"progress": "yes"}, TypeError, "True, False or None"),
        ({"attention": 3}, TypeError, "attention=3"),
    ],
)
def test_bad_option_names_the_value_and_what_is_valid(options: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        Options.parse(options)


def test_defaults_are_those_of_the_docs() -> None:
    options = Options.parse(None)
    assert options.ladder[:9] == (8, 16, 32, 64, 96, 128, 192, 256, 384)
    assert options.ladder[-1] == 2048
    assert options.slots == 32
    assert Options(max_tokens=8).slots == 8
    assert Options(max_tokens=512).slots == 16


def test_buckets_are_sorted_unique_and_end_at_max_tokens() -> None:
    assert Options(buckets=(16, 8, 16)).ladder == (8, 16)
    assert Options(buckets=(16, 8)).max_tokens == 16
    assert Options.parse({"buckets": [8, 32, 64], "max_tokens": 40}).ladder == (8, 32, 40)
    assert Options.parse({"buckets": [8], "max_tokens": 100}).ladder == (8, 100)


def test_max_tokens_that_is_given_holds_whatever_its_value_and_however_the_options_are_made() -> None:
    assert Options(buckets=(8, 16), max_tokens=2048).ladder == (8, 16, 2048)
    assert Options.parse({"buckets": [8, 16], "max_tokens": 2048}).ladder == (8, 16, 2048)
    assert Options(buckets="measured").max_tokens == Options().max_tokens == 2048


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda values: [*map(np.int64, values)]])
def test_buckets_and_lengths_may_be_arrays_and_tensors_of_integers(kind: Any) -> None:
    assert Options.parse({"buckets": kind([16, 8])}) == Options(buckets=(8, 16))
    counted = Options.parse({"buckets": "measured", "lengths": kind([30, 7, 30])})
    assert counted.lengths == ((7, 1), (30, 2))
    assert all(type(n) is int for n in (*Options(buckets=kind([8])).ladder, *sum(counted.lengths, ())))


def test_equal_options_compare_equal_whichever_way_they_were_given() -> None:
    assert Options.parse({"max_tokens": 2048}) == Options()
    counted = Options.parse({"buckets": "measured", "lengths": {30: 2, 7: 1}})
    assert counted == Options.parse({"buckets": "measured", "lengths": [30, 7, 30]})
    assert hash(counted) and counted.measured and counted.lengths == ((7, 1), (30, 2))
    assert Options(memory_budget="300MiB").memory_budget == 300 << 20  # type: ignore[arg-type]
    assert Options(memory_budget="0.5 gb").memory_budget == 5 * 10**8  # type: ignore[arg-type]
    assert hash(Options.parse({"buckets": [8]})) == hash(Options(buckets=(8,)))
