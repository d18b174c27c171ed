"""Small calls of our own run on a stream that captures use again, in order with the caller's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fullgraph_compile.graphs import streams


class Stream:
    """What of a CUDA stream is used, with a record of who waits for whom."""

    made = 0

    def __init__(self, device: Any, said: list[str], name: str = "") -> None:
        Stream.made += not name
        self.device, self.said, self.name = torch.device("cuda", 0), said, name or f"side {Stream.made}"

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    Stream.made = 0

    @contextmanager
    def entered(stream: Any):
        said.append(f"on {getattr(stream, 'name', stream)}")
        yield

    monkeypatch.setattr(streams, "_free", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(device, said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(None, said, "caller"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "device", entered)
    return said


def test_the_stream_is_in_order_with_the_callers_and_is_used_again(said: list[str]) -> None:
    for _ in range(2):
        with streams.aside(torch.device("cuda", 0)):
            said.append("work")
    once = ["on cuda:0", "side 1 waits for caller", "on side 1", "work", "caller waits for side 1"]
    assert said == [*once, *once] and Stream.made == 1
    assert streams.borrow_stream(torch.device("cuda", 0)).name == "side 1"  # type: ignore[attr-defined]


def test_a_stream_that_is_in_use_is_nobody_elses(said: list[str]) -> None:
    first = streams.borrow_stream(torch.device("cuda", 0))
    with streams.aside(torch.device("cuda", 0)):
        pass
    assert "on side 2" in said
    streams.return_stream(first)
    assert streams.borrow_stream(torch.device("cuda", 0)) is first


def test_after_an_error_the_caller_waits_all_the_same_and_the_stream_is_free(said: list[str]) -> None:
    with pytest.raises(RuntimeError, match="planned"), streams.aside(torch.device("cuda", 0)):
        raise RuntimeError("planned")
    assert said[-1] == "caller waits for side 1"
    assert streams.borrow_stream(torch.device("cuda", 0)).name == "side 1"  # type: ignore[attr-defined]


def test_on_a_cpu_nothing_happens() -> None:
    with streams.aside(torch.device("cpu")):
        pass
