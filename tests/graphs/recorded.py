"""A run over static buffers, its recording, and what eager gives for the same input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullgraph_compile.graphs.tape import Tape, TapeRecorder

Function = Callable[[Tensor], Tensor]


class Recorded:
    """``function`` over a static input of ``shape``, recorded on a tape after two warm-ups.

    Calling it stages the input (padding the rows past the end with zeros), replays, and gives the static output.
    """

    def __init__(self, function: Function, shape: Sequence[int] = (8, 4), recorder: TapeRecorder | None = None) -> None:
        self.function = function
        self.recorder = recorder or TapeRecorder()
        self.x = torch.randn(*shape)
        with torch.no_grad():
            self.out = torch.empty_like(function(self.x))
        # No session: to collect garbage takes longer than the rest.
        self.run()
        self.run()
        self.tape: Tape = self.recorder.record(self.run)

    def run(self) -> None:
        with torch.no_grad():
            self.out.copy_(self.function(self.x))

    def stage(self, x: Tensor) -> None:
        self.x.zero_()
        self.x[: x.shape[0]].copy_(x)

    def __call__(self, x: Tensor) -> Tensor:
        self.stage(x)
        self.tape.replay()
        return self.out.clone()

    def eager(self, x: Tensor) -> Tensor:
        self.stage(x)
        self.run()
        return self.out.clone()


def check(recorded: Recorded, rows: Sequence[int] = (8, 3, 8, 1)) -> None:
    """Replays are exact over new inputs, long after short and short after long."""
    for n in rows:
        x = torch.randn(n, *recorded.x.shape[1:])
        replayed, eager = recorded(x), recorded.eager(x)
        assert torch.equal(replayed, eager)
        assert not eager.isnan().any()
