"""The factory, and sessions."""

from __future__ import annotations

import gc

import pytest
import torch

from fullgraph_compile.graphs import CaptureError, create_recorder
from fullgraph_compile.graphs.tape import TapeRecorder
from tests.graphs.recorded import Recorded, check

CPU = torch.device("cpu")


def test_kinds() -> None:
    assert create_recorder("none", CPU) is None
    tape = create_recorder("tape", CPU)
    assert isinstance(tape, TapeRecorder)
    assert tape.name == "tape"


def test_cuda_graphs_on_a_cpu_are_an_error_that_says_what_is_valid() -> None:
    with pytest.raises(ValueError, match=r"CUDA device.*cpu.*'tape', 'none', 'auto'"):
        create_recorder("cuda", CPU)


def test_an_unknown_kind_is_an_error_that_says_what_is_valid() -> None:
    with pytest.raises(ValueError, match="'metal' is not one of 'cuda', 'tape', 'none'"):
        create_recorder("metal", CPU)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError, CaptureError, KeyboardInterrupt])
def test_b111_the_collector_is_off_in_a_session_and_then_as_it_was(
    enabled: bool, error: type[BaseException] | None
) -> None:
    recorder = TapeRecorder()
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        try:
            with recorder.session():
                assert not gc.isenabled()
                if error is not None:
                    raise error
        except BaseException as raised:
            assert type(raised) is error
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_b111_a_cycle_on_an_old_graph_is_not_collected_while_recording() -> None:
    class Cycle:
        def __init__(self, tape: object) -> None:
            self.tape, self.me = tape, self

        def __del__(self) -> None:
            freed.append(True)

    freed: list[bool] = []
    recorder = TapeRecorder()
    old = Recorded(lambda x: x + 1, recorder=recorder)
    x, out = torch.randn(8, 4), torch.empty(8, 4)

    def run() -> None:
        Cycle(old.tape)
        for _ in range(2000):  # enough garbage for a collection, were it on
            [[]].append([])
        _ = [[] for _ in range(5000)]
        assert not freed
        out.copy_(x + 1)

    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        with recorder.session():
            assert not freed
            tape = recorder.record(run)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert freed
    tape.replay()
    assert torch.equal(out, x + 1)
    check(old)
