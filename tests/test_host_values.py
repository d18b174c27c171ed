"""Integers that all calls share, and what a call that writes to them would do to the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile.host_values import counting, to_device

CPU = torch.device("cpu")


def test_counting_is_made_once_and_again_when_it_is_too_short() -> None:
    first = counting(7, CPU)
    assert first.shape == (1, 7) and first.dtype is torch.int64 and first[0].tolist() == list(range(7))
    assert counting(5, CPU).data_ptr() == first.data_ptr()
    assert counting(5000, CPU)[0].tolist() == list(range(5000))
    assert counting(0, CPU).shape == (1, 0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_was_written_to_is_not_given_again(mode: type) -> None:
    with mode():
        counting(7, CPU).add_(1)
        counting(7, CPU)[0, 3] = 9
        assert counting(7, CPU)[0].tolist() == list(range(7))


def test_positions_that_the_user_gets_are_the_users_own() -> None:
    batch = fgc.PrefillBatch([6], device="cpu")
    batch.position_ids.add_(1)
    assert fgc.PrefillBatch([6], device="cpu").position_ids.tolist() == list(range(6))
    assert fgc.PrefillBatch([6], device="cpu").row_of_positions[0].tolist() == list(range(6))


def test_an_array_of_another_kind_becomes_int64() -> None:
    there = to_device(np.array([[3, 1], [2, 0]], dtype=np.int32).T, CPU)
    assert there.dtype is torch.int64 and there.tolist() == [[3, 2], [1, 0]]


def test_numbers_of_a_mode_are_not_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        counting(11, CPU), counting(20000, CPU)
    for n in (11, 20000):
        assert type(counting(n, CPU)) is torch.Tensor and counting(n, CPU)[0].tolist() == list(range(n))
