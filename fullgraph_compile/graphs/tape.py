"""The tape: a CPU double of graph replay.

It records the ops of one run with every Python value frozen, and replays the same ops on the same storages.  What a
CUDA graph would do wrong on a GPU, it does wrong here: a number that should have changed keeps its value, a buffer
that was rebound is not seen, an output is overwritten by the next replay.

Two kinds of memory:

    scratch  made while recording.  In a CUDA graph it is memory of the shared pool, which any replay may reuse: it is
             filled with poison before a replay of its own tape, and of any other.
    static   was there before.  It keeps its address, and only what the run does writes it.

Limits: one thread and no streams, so no fault of order shows; memory is not reused, only poisoned, so a tape holds all
of its intermediates; custom ops in C++ and opaque calls are made anew at each replay, and what such a call writes to
its arguments is not undone after recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from fullgraph_compile.graphs.base import CaptureError, GraphRecorder, RecordedGraph, casts_of_its_own
from fullgraph_compile.graphs.recording import Recording, Step, poison


class Tape(RecordedGraph):
    """One recorded run.

    Attributes:
        nodes: calls that a replay makes.
        opaque_ops: custom ops that have no implementation in Python, so that each is recorded as one call, with how
            often: a stale integer inside of them goes unseen.
    """

    def __init__(self, recorder: TapeRecorder, recording: Recording) -> None:
        self._recorder = recorder
        self._steps: list[Step] | None = recording.steps
        self._scratch = {key: m.whole for key, m in recording.memory.items() if m.kind == "scratch"}
        self._inference = torch.is_inference_mode_enabled()
        self._dirty = True
        self.nodes = len(recording.steps)
        self.opaque_ops = recording.opaque_ops

    def replay(self) -> None:
        """Replay, after another graph of the pool has used this one's memory and this one that of the others."""
        for other in self._recorder.tapes:
            if other is not self:
                other.poison()
        self._play()

    def _play(self, kept: set[int] | None = None) -> None:
        if self._steps is None:
            raise RuntimeError("this graph was closed")
        self.poison()
        self._dirty = True
        # Compiled pieces are guarded on both modes; scratch made under inference_mode can be written only there.  The
        # caller's autocast casts nothing of a graph: what it casts was recorded.
        with torch.inference_mode(self._inference), torch.no_grad(), torch._C._DisableAutocast():
            for step in self._steps:
                step.replay(kept)

    def _check(self, recording: Recording) -> None:
        """Replay over poisoned scratch: what the recording did not see shows as another value."""
        unseen = recording.unseen()
        if unseen is not None:
            raise CaptureError(
                f"{unseen.first} takes memory that was made during the run but by no recorded call, so a replay would "
                "not make it again: mark the compiled piece that makes it with opaque(), or make it before recording"
            )
        written = [m for m in recording.memory.values() if m.before is not None]
        after = [m.whole.clone() for m in written]
        recording.undo()
        kept: set[int] = set()
        try:
            self._play(kept)
        except Exception as error:
            raise CaptureError(f"what was recorded cannot be replayed: {error}") from error
        for memory, expected in zip(written, after, strict=True):
            if not _same(memory.whole, expected):
                raise CaptureError(
                    f"a replay leaves other values than the run in memory that {memory.first} was the first to touch: "
                    "a part of the run was not recorded (a compiled piece that is not marked with opaque()?)"
                )
        for key, memory in recording.memory.items():
            if memory.kind == "piece" and key not in kept:
                self._scratch[key] = memory.whole

    def poison(self) -> None:
        """Fill the scratch with poison, unless nothing has been written there since it was."""
        if self._dirty:
            with torch.inference_mode():
                for tensor in self._scratch.values():
                    poison(tensor)
        self._dirty = False

    def close(self) -> None:
        self._steps = None
        self._scratch = {}
        self._recorder.tapes.discard(self)


class TapeRecorder(GraphRecorder):
    """Records runs on tapes, which stand for graphs that share one pool.

    Args:
        device: where the runs compute; meant for the CPU.
    """

    name = "tape"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.tapes: weakref.WeakSet[Tape] = weakref.WeakSet()

    def record(self, run: Callable[[], None]) -> Tape:
        recording = Recording(self.device)
        try:
            with recording.on(), casts_of_its_own():
                run()
            tape = Tape(self, recording)
            for other in self.tapes:
                for key in other._scratch.keys() & recording.memory.keys():
                    raise CaptureError(
                        f"{recording.memory[key].first} takes memory that was made while another graph was recorded, "
                        "which any replay may overwrite: make it before recording, or copy it"
                    )
            tape._check(recording)
        finally:
            recording.undo()
        self.tapes.add(tape)
        return tape

    def close(self) -> None:
        for tape in list(self.tapes):
            tape.close()


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal; NaN is NaN, and the last bits may depend on how threads share the work."""
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if a.element_size() < 2:
        a, b = a.float(), b.float()
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
