"""Two ranks, as two processes over gloo: collectives inside of a body."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS = 2
LIMIT = 180  # seconds, so that ranks that wait for each other end


class Summed(nn.Module):
    """Half of a feed-forward layer; the other rank has the other half."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank + 1)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        import torch.distributed._functional_collectives as collectives

        return collectives.all_reduce(self.down(nn.functional.silu(self.up(x))), "sum", dist.group.WORLD)


def rank_of_two(rank: int, meeting: str, results: Queue[Any]) -> None:
    """Compile, call in one order on both ranks, and compare with eager of this rank, which sums over both too."""
    import fullgraph_compile as fgc
    from tests.models import T2, tokens
    from tests.reports.cases import TAPE, packed, per_request

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    body, eager = T2(mlp=Summed(rank)).eval(), T2(mlp=Summed(rank)).eval()
    fgc.compile(body, buckets=[8, 16], request_slots=4, **TAPE)
    worst = 0.0
    for lengths in ([5], [3, 2], [9, 4], [5], [33]):
        ids = tokens(sum(lengths))
        got, want = packed(body, ids, lengths), per_request(eager, ids, lengths)
        worst = max(worst, float((got - want).abs().max()))
    report = fgc.report(body)
    results.put((rank, worst, dict(report.replays), [f"{r.value}: {report.details[r]}" for r in report.fallbacks]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")
def test_b113_a_collective_is_captured_or_refused_by_name_and_both_ranks_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    ranks = [context.Process(target=rank_of_two, args=(r, str(tmp_path / "meet"), results)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        found = sorted(results.get(timeout=LIMIT) for _ in ranks)
        for process in ranks:
            process.join(LIMIT)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    (_, worst, replays, refused), (_, other_worst, *other) = found
    assert max(worst, other_worst) < 1e-5
    assert [replays, refused] == other, "both ranks went the same way"
    assert sum(replays.values()) >= 3 or any("all_reduce" in text for text in refused), refused
