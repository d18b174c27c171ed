"""Getting ready: caches on disk are used, kernels are compiled side by side, the collector keeps out of the trace."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import compilers, tracing
from tests.models import T2
from tests.runtime.bodies import compiled, run, small


def body_without_graphs() -> Any:
    return fgc.compile(T2(layers=1, hidden=8, heads=1).eval(), graphs="none", compiler="inductor", max_tokens=16)


def test_a_second_process_finds_every_piece_in_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two bodies in one process: they share no compiled code, only what is on disk.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        body = body_without_graphs()
        run(body, 5)
        report = fgc.report(body)
        assert report.pieces == 2
        found.append(report.cached_pieces)
        fgc.close(body)
    assert found == [0, 2]
    assert "2 of 2 pieces from the cache" in str(report)


def test_the_workers_are_started_before_the_trace_and_only_for_kernels_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    module = ModuleType("torch._inductor.async_compile")
    module.maybe_warm_pool = lambda: started.append("pool")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", module)
    compilers.warm_workers("inductor", torch.device("cpu"))
    compilers.warm_workers("aot_eager", torch.device("cuda"))
    assert not started
    compilers.warm_workers("inductor", torch.device("cuda"))
    assert started == ["pool"]
    del module.maybe_warm_pool
    compilers.warm_workers("inductor", torch.device("cuda"))  # a torch that has none


def test_torch_has_the_workers_that_are_started() -> None:
    from torch._inductor.async_compile import maybe_warm_pool

    assert callable(maybe_warm_pool)


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_off_during_the_trace_and_then_as_it_was(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = tracing.compile_graph

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(tracing, "compile_graph", watched)
    body = compiled("compile", small())
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        run(body, 5)
        assert seen == [False]
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()
