"""Pinned blocks: none is written before the copy that reads it has run, and the host does not wait without need."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from fullgraph_compile.pinned import PinnedRing


class Device:
    """A stream that does nothing until the host waits for it."""

    def __init__(self) -> None:
        self.jobs: deque[Any] = deque()
        self.waited_for: list[int] = []

    def run_to(self, job: Any) -> None:
        while job in self.jobs:
            done = self.jobs.popleft()
            if callable(done):
                done()


class Event:
    """Waits for what was on the stream when it was recorded last."""

    def __init__(self, device: Device) -> None:
        self.device, self.mark = device, None

    def record(self) -> None:
        self.mark = object()
        self.device.jobs.append(self.mark)

    def synchronize(self) -> None:
        if self.mark is not None:
            before = len(self.device.jobs)
            self.device.run_to(self.mark)
            self.device.waited_for.append(before - len(self.device.jobs))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(PinnedRing, "_new_event", lambda self: Event(device))
    monkeypatch.setattr(PinnedRing, "_record", lambda self, event: event.record())
    return device


def write_and_copy(ring: PinnedRing, device: Device, number: int, copied: list[int]) -> None:
    block = ring.take()
    block.memory[0] = number
    device.jobs.append(lambda: copied.append(int(block.memory[0])))


@pytest.mark.parametrize("blocks", [4, 16])
def test_a_block_is_not_written_before_it_was_copied(device: Device, blocks: int) -> None:
    ring, copied = PinnedRing(torch.device("cpu"), blocks), []
    ring.reserve(64)
    for number in range(100):
        write_and_copy(ring, device, number, copied)
    ring.wait()
    assert copied == list(range(100))


@pytest.mark.parametrize("before", range(20))
def test_half_of_the_blocks_are_written_without_a_wait_for_their_copies(device: Device, before: int) -> None:
    ring, copied = PinnedRing(torch.device("cpu")), []
    ring.reserve(64)
    for number in range(before):
        write_and_copy(ring, device, number, copied)
    while device.jobs:  # the device is idle
        job = device.jobs.popleft()
        if callable(job):
            job()
    done = len(copied)
    for number in range(8):
        write_and_copy(ring, device, number, copied)
    assert len(copied) == done, "the host waited for a copy of its own last eight"


def test_larger_blocks_wait_for_the_copies_from_the_smaller(device: Device) -> None:
    ring, copied = PinnedRing(torch.device("cpu")), []
    ring.reserve(64)
    write_and_copy(ring, device, 7, copied)
    ring.reserve(4096)
    assert not copied, "these are as large already"
    ring.reserve(4097)
    assert copied == [7] and ring.take().bytes.numel() == 8192
