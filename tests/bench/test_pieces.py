"""The body in pieces, attention eager between them: the same result as the whole, launch by launch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullgraph_compile.bench import routes
from fullgraph_compile.bench.routes import Ours
from fullgraph_compile.graphs import GraphRecorder, RecordedGraph
from tests.models import tiny, tokens


class Again(RecordedGraph):
    """Runs the run again, which writes to the memory that the first run made: as a graph does, but on a CPU."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.closed = False
        run()

    def replay(self) -> None:
        assert not self.closed
        self.run()

    def close(self) -> None:
        self.closed = True


class Recorder(GraphRecorder):
    name = "again"

    def __init__(self) -> None:
        self.graphs: list[Again] = []

    def record(self, run: Callable[[], None]) -> Again:
        self.graphs.append(Again(run))
        return self.graphs[-1]

    def close(self) -> None:
        pass


def ours(module: nn.Module, **options: Any) -> Ours:
    body = Ours(module, torch.device("cpu"), {"max_tokens": 32, "graphs": "tape", "compiler": "eager", **options})
    body.start()
    return body


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_the_pieces_give_what_the_model_gives_for_any_length_in_the_bucket(
    name: str, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny(name, sliding_window=4) if name == "Gemma2" else tiny(name)
    if name == "Gemma2":
        module.set_attn_implementation("eager")  # the one that keeps the soft cap
    eager = copy.deepcopy(module)
    body = ours(module, fuse_projections=fuse)
    recorder = Recorder()
    monkeypatch.setattr(routes, "create_recorder", lambda kind, device: recorder)
    with body.pieces(16, tokens(9)[None]) as call:
        assert len(recorder.graphs) == 3, "a piece before each of two sites, and one after the last"
        for n in (16, 3, 11, 16):
            ids = tokens(n, seed=n)[None]
            with torch.no_grad():
                want = eager(input_ids=ids, use_cache=False)[0]
            (got,) = call(ids)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert all(g.closed for g in recorder.graphs)


def test_without_graphs_is_for_the_calls_inside_only() -> None:
    body = ours(tiny("Llama"))
    assert body.decision(5).bucket == 8
    with body.without_graphs():
        assert body.decision(5).bucket is None
        body(tokens(5)[None])
    assert body.decision(5).bucket == 8
