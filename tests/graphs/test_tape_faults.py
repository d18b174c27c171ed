"""Faults that a CUDA graph would show on a GPU, planted: the tape shows each by a wrong value, not by an exception.

Each plant is right when it runs live and wrong when it is replayed, else it would prove nothing; and beside each is
the same thing done well, which replays right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from fullgraph_compile.graphs import CaptureError, below
from fullgraph_compile.graphs.tape import TapeRecorder
from tests.graphs.recorded import Recorded

ROWS = 8
library = torch.library.Library("fgc_test_faults", "DEF")
library.define("first_rows(Tensor x) -> Tensor")
library.define("first_rows_defaulted(Tensor x) -> Tensor")


@dataclass
class Metadata:
    """What a batch says of itself: as Python integers, and in device memory."""

    rows: int = ROWS
    real: Tensor = field(default_factory=lambda: torch.tensor([ROWS]))

    def stage(self, rows: int) -> None:
        self.rows = rows
        self.real.fill_(rows)


BATCH = Metadata()


@pytest.fixture(autouse=True)
def fresh_metadata() -> None:
    global BATCH
    BATCH = Metadata()


def by_python_integer(x: Tensor) -> Tensor:
    """Zeros past the real rows, with the host's idea of how many there are."""
    out = torch.zeros_like(x)
    out[: BATCH.rows] = x[: BATCH.rows] + 1
    return out


def by_device_memory(x: Tensor) -> Tensor:
    real = torch.arange(x.shape[0])[:, None] < BATCH.real
    return torch.where(real, x + 1, 0.0)


library.impl("first_rows", lambda x: by_python_integer(x), "CPU")
library.impl("first_rows_defaulted", lambda x: by_device_memory(x), "CPU")


@torch.library.custom_op("fgc_test_faults::first_rows_op", mutates_args=())
def first_rows_op(x: Tensor) -> Tensor:
    return by_python_integer(x)


def differs(recorded: Recorded, rows: int) -> bool:
    """Whether a replay differs from eager at ``rows`` real rows; padded rows count too."""
    BATCH.stage(rows)
    x = torch.randn(ROWS, 4)
    replayed, eager = recorded(x), recorded.eager(x)
    assert not eager.isnan().any()
    return not torch.equal(replayed, eager)


def test_right_metadata_is_right_in_every_order() -> None:
    for function in (by_device_memory, torch.ops.fgc_test_faults.first_rows_defaulted):
        recorded = Recorded(function)
        assert [differs(recorded, n) for n in (8, 3, 5, 1, 8)] == [False] * 5


@pytest.mark.parametrize(
    "function",
    [by_python_integer, torch.ops.fgc_test_faults.first_rows, first_rows_op],
    ids=["above the op", "below an op of a Library", "below a custom_op"],
)
def test_a_stale_python_integer_shows(function: object) -> None:
    recorded = Recorded(function)  # type: ignore[arg-type]
    assert not differs(recorded, 8)  # what it was recorded with
    assert differs(recorded, 3)
    assert differs(recorded, 5)


@pytest.mark.parametrize("how", ["attribute", "data"])
def test_a_rebound_buffer_shows(how: str) -> None:
    recorded = Recorded(by_device_memory)
    assert not differs(recorded, 3)
    x = torch.randn(ROWS, 4)
    if how == "attribute":
        BATCH.real = torch.tensor([5])
    else:
        BATCH.real.data = torch.tensor([5])
    replayed, eager = recorded(x), recorded.eager(x)
    assert not torch.equal(replayed, eager)
    assert replayed[3:].eq(0).all()  # the recorded memory says 3 still
    assert eager[3:5].ne(0).any()


def test_an_uncleared_tail_shows_when_short_follows_long() -> None:
    def sums_all_rows(x: Tensor) -> Tensor:
        return x + x.sum(0)  # right only if the rows past the end are zero

    recorded = Recorded(sums_all_rows)
    long, short = torch.randn(8, 4), torch.randn(3, 4)
    assert torch.equal(recorded(long), recorded.eager(long))
    good = recorded(short)
    recorded.x.copy_(long)
    recorded.x[:3].copy_(short)  # the tail keeps the last batch
    recorded.tape.replay()
    assert not torch.equal(recorded.out[:3], good[:3])
    assert not recorded.out.isnan().any()


def test_skipped_zeroing_of_padded_rows_shows() -> None:
    def unwritten(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:5].copy_(x[:5])
        return out

    def written(x: Tensor) -> Tensor:
        out = unwritten(x)
        out[5:].zero_()
        return out

    x = torch.randn(8, 4)
    assert Recorded(unwritten)(x)[5:].isnan().all()
    assert not Recorded(written)(x).isnan().any()


def test_memory_read_before_it_is_written_shows_in_every_replay() -> None:
    def late(x: Tensor) -> Tensor:
        h = torch.empty_like(x)
        h[:5].copy_(x[:5])
        out = h.clone()
        h[5:].fill_(1)  # too late for this replay; the next one must not live on it
        return out

    recorded = Recorded(late)
    for _ in range(3):
        assert recorded(torch.randn(8, 4))[5:].isnan().all()


class Held:
    """A run that lets its result out without copying it into a static buffer."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self.x = torch.randn(ROWS, 4)
        self.held: Tensor | None = None
        self.out = torch.empty(ROWS, 4)
        with recorder.session():
            self.tape = recorder.record(self.run)

    def run(self) -> None:
        self.held = self.x * 2
        self.out.copy_(self.held)

    def __call__(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.tape.replay()
        assert self.held is not None
        return self.held


@pytest.mark.parametrize("lease", ["itself", "detached", "slice", "flat"])
def test_b66_an_output_held_over_the_next_replay_shows(lease: str) -> None:
    take = {
        "itself": lambda y: y,
        "detached": lambda y: y.detach(),
        "slice": lambda y: y[0:2],
        "flat": lambda y: y.view(-1),
    }[lease]
    graph = Held(TapeRecorder())
    x1, x2 = torch.randn(2, ROWS, 4)
    y1 = take(graph(x1))
    owned = y1.clone()
    assert torch.equal(y1, take(x1 * 2))  # right until the next replay
    graph(x2)
    assert torch.equal(y1, take(x2 * 2))
    assert not torch.equal(y1, owned)


def test_b66_an_output_held_while_another_graph_of_the_pool_replays_shows() -> None:
    recorder = TapeRecorder()
    a, b = Held(recorder), Held(recorder)
    x = torch.randn(ROWS, 4)
    held, static = a(x), a.out
    owned = static.clone()
    b(x)
    assert held.isnan().all()  # memory of the pool
    assert torch.equal(static, owned)  # static buffers are the caller's
    assert torch.equal(a(x), x * 2)  # and the graph itself is whole


def test_graphs_of_different_recorders_do_not_share_a_pool() -> None:
    a, b = Held(TapeRecorder()), Held(TapeRecorder())
    x = torch.randn(ROWS, 4)
    held = a(x)
    b(x)
    assert torch.equal(held, x * 2)


@pytest.mark.parametrize("owned", [True, False], ids=["static output", "memory of the pool"])
def test_b67_one_graphs_output_is_anothers_input(owned: bool) -> None:
    recorder = TapeRecorder()
    f, g = Held(recorder), Held(recorder)
    x = torch.randn(ROWS, 4)

    def value(graph: Held, y: Tensor) -> Tensor:
        result = graph(y)
        return graph.out if owned else result

    z = value(g, value(f, x)).clone()
    assert torch.equal(z, x * 4)  # staged before the other replays: right either way
    y = value(f, x)
    value(g, torch.zeros_like(x))  # now the other one replays in between
    z = value(f, y)
    assert torch.equal(z, x * 4) is owned


def lazily(lazy: dict[str, Tensor], x: Tensor) -> Tensor:
    if "table" not in lazy:
        lazy["table"] = torch.arange(4.0) + 1
    return x * lazy["table"]


def test_state_made_lazily_while_recording_shows_where_it_is_used_again() -> None:
    recorder, lazy = TapeRecorder(), dict[str, Tensor]()
    x, out = torch.randn(ROWS, 4), torch.empty(ROWS, 4)
    first = recorder.record(lambda: out.copy_(lazily(lazy, x)))  # no warm-up: the table lies in the pool
    first.replay()
    assert torch.equal(out, x * (torch.arange(4.0) + 1))
    Held(recorder)(x)
    assert lazily(lazy, x).isnan().all()  # outside of a graph
    with pytest.raises(CaptureError, match=r"aten\.mul.*another graph"):  # in another graph
        recorder.record(lambda: out.copy_(lazily(lazy, x)))


def test_state_made_in_a_warm_up_is_no_memory_of_the_pool() -> None:
    recorder, lazy = TapeRecorder(), dict[str, Tensor]()
    graphs = [Recorded(lambda x: lazily(lazy, x), recorder=recorder) for _ in range(2)]
    for graph in (*graphs, *graphs):
        x = torch.randn(ROWS, 4)
        assert torch.equal(graph(x), x * (torch.arange(4.0) + 1))


def test_faults_below_are_seen_through_the_mark_as_well() -> None:
    def attends(x: Tensor) -> Tensor:
        with below():
            return by_python_integer(x)

    recorded = Recorded(attends)
    assert differs(recorded, 2)
