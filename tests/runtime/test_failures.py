"""A capture or a replay that fails: the same call is right all the same."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from fullgraph_compile.graphs import CaptureError
from fullgraph_compile.graphs.tape import Tape, TapeRecorder
from tests.models import tiny_causal_lm, tokens
from tests.runtime.bodies import both_ways, check, check_replayed, compiled, ready, replays, runners, small


class Planned(RuntimeError):
    """A failure that a test planted."""


@both_ways
@pytest.mark.parametrize("error", [CaptureError("planned"), torch.OutOfMemoryError("planned")])
def test_b114_capture_fails_and_the_same_call_is_right(
    way: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = small()
    eager = copy.deepcopy(module)

    def record(self: TapeRecorder, piece_loop: Callable[[], None]) -> Tape:
        raise error

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fullgraph_compile"):
        patch.setattr(TapeRecorder, "record", record)
        body = compiled(way, module)
        check(body, eager, 5, 7, 12, 7)
    assert gc.isenabled()
    report = fgc.report(body)
    assert not report.replays
    assert report.buckets == ()
    assert report.fallbacks[Reason.CAPTURE_FAILED] == (4 if way == "compile" else 3)
    assert "planned" in report.details[Reason.CAPTURE_FAILED]
    assert "planned" in caplog.text
    fgc.release(body)  # gives it another chance
    check_replayed(body, eager, 7, 12)


def test_the_cause_is_told_where_the_first_call_was_a_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: TapeRecorder, piece_loop: Callable[[], None]) -> Tape:
        raise CaptureError("planned")

    monkeypatch.setattr(TapeRecorder, "record", record)
    model: Any = fgc.compile(tiny_causal_lm("Llama"), buckets=[16], graphs="tape", compiler="eager")
    ids = tokens(14).view(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    report = fgc.report(model)
    assert report.fallbacks == {Reason.CAPTURE_FAILED: 1}
    assert "planned" in report.details[Reason.CAPTURE_FAILED]


@both_ways
def test_b74_one_bucket_of_three_fails_to_capture_and_the_others_work(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = small()
    eager = copy.deepcopy(module)
    recorded: list[int] = []
    real = TapeRecorder.record

    def record(self: TapeRecorder, piece_loop: Callable[[], None]) -> Tape:
        recorded.append(1)
        if len(recorded) == 2:  # of 32, 16, 8

            def failing() -> None:
                piece_loop()
                raise Planned("in the middle of 16")

            return real(self, failing)
        return real(self, piece_loop)

    monkeypatch.setattr(TapeRecorder, "record", record)
    body = compiled(way, module, buckets=[8, 16, 32])
    check(body, eager, 5, 6)
    assert fgc.report(body).buckets == (8, 32)
    assert fgc.report(body).ready
    check_replayed(body, eager, 7, 30, 3)
    before = replays(body)
    check(body, eager, 12, 16)
    assert replays(body) == before
    report = fgc.report(body)
    assert report.fallbacks[Reason.CAPTURE_FAILED] == 2
    assert "bucket 16" in report.details[Reason.CAPTURE_FAILED]
    assert "in the middle of 16" in str(report)
    with torch.no_grad():
        assert Reason.CAPTURE_FAILED.value in fgc.explain(body, tokens(12)[None], torch.arange(12)[None])
    monkeypatch.undo()
    again = small()
    eager = copy.deepcopy(again)
    check_replayed(ready(way, again), eager, 7, 12)


@pytest.mark.parametrize("later", [False, True])
@both_ways
def test_b114_replay_fails_and_the_same_call_is_right(way: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    if later:
        check_replayed(body, eager, 7, 3, 7)
    (runner,) = runners(body)
    graph = runner.buckets[8].graph
    launched: list[int] = []

    def replay() -> None:
        launched.append(1)
        raise Planned("the launch")

    monkeypatch.setattr(graph, "replay", replay)
    before = replays(body)
    check(body, eager, 7, seed=5)
    check(body, eager, 4, 8, seed=6)
    assert replays(body) == before
    assert len(launched) == 1  # off from then on
    report = fgc.report(body)
    assert report.fallbacks[Reason.REPLAY_FAILED] == 3
    assert "the launch" in report.details[Reason.REPLAY_FAILED]
    assert report.buckets == (16,)
    check_replayed(body, eager, 12, 9)


@both_ways
def test_a_call_that_is_wrong_fails_as_without_graphs_and_turns_nothing_off(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    check_replayed(body, eager, 7)
    (runner,) = runners(body)
    batch = fgc.PrefillBatch([7], device="cpu")
    for _ in range(2):
        with pytest.raises(IndexError), torch.no_grad(), batch:
            body(input_ids=tokens(7)[None] + 500, position_ids=batch.position_ids[None])
    assert not runner.limits.off and Reason.REPLAY_FAILED not in fgc.report(body).fallbacks
    check_replayed(body, eager, 7, 4, 12)


@pytest.mark.parametrize("error", [ValueError, KeyError])
@pytest.mark.parametrize("where", ["capture", "replay"])
def test_b114_any_failure_of_a_recording_is_survived(
    where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention backends are others' code: what they raise is no reason to lose a call that can run without a graph."""
    module = small()
    eager = copy.deepcopy(module)

    def fails(*args: Any) -> Any:
        raise error("planned")

    if where == "capture":
        monkeypatch.setattr(TapeRecorder, "record", fails)
        body = compiled("compile", module)
    else:
        body = ready("compile", module)
        for bucket in runners(body)[0].buckets.values():
            monkeypatch.setattr(bucket.graph, "replay", fails)
    check(body, eager, 7, 12)
    assert gc.isenabled()
    reason = Reason.CAPTURE_FAILED if where == "capture" else Reason.REPLAY_FAILED
    assert fgc.report(body).fallbacks[reason] == 2
