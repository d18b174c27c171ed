"""SGLang's vectors of request slots are written by few launches, and hold what SGLang asked for."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullgraph_compile.integrations.sglang.vectors import defer

NAMES = ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "req_pool_indices", "orig_seq_lens")
SLOTS = 4


class Writes(TorchDispatchMode):
    """Counts calls that would be launches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name.endswith("_"):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class Runner:
    """Loads batches as SGLang's does."""

    def __init__(self) -> None:
        self._prefill_static_buffers: dict[str, Tensor] = {n: torch.full((8,), 7, dtype=torch.int64) for n in NAMES}
        self.prepared: Any = None
        self.fails = False

    def load_batch(self, batch: Any) -> str:
        live, s = batch.batch_size, self._prefill_static_buffers
        for name in NAMES:
            s[name][:live].copy_(getattr(batch, name))
        for name in NAMES:
            if name == "extend_start_loc":
                s[name][live:SLOTS].fill_(batch.tokens)
            else:
                s[name][live:SLOTS].zero_()
        if self.fails:
            raise RuntimeError("no such batch")
        self.prepare()
        return "loaded"

    def prepare(self) -> None:
        self.prepared = {n: t[:SLOTS].tolist() for n, t in self._prefill_static_buffers.items()}


def batch(live: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    given: dict[str, Any] = {n: torch.randint(1, 99, (live,), generator=generator) for n in NAMES}
    for name in ("extend_seq_lens", "extend_start_loc"):
        given[name] = given[name].to(torch.int32)
    return SimpleNamespace(batch_size=live, tokens=17 + seed, **given)


def deferred() -> Runner:
    runner = Runner()
    loaded, prepare = defer(runner), runner.prepare
    runner.prepare = lambda: (loaded(), prepare())[1]  # type: ignore[method-assign]
    return runner


@pytest.mark.parametrize("lives", [(1, 3, 4, 2, 1), (4, 1)])
def test_vectors_hold_what_sglang_asked_for_when_metadata_is_prepared(lives: tuple[int, ...]) -> None:
    runner, plain = deferred(), Runner()
    for seed, live in enumerate(lives):
        assert runner.load_batch(batch(live, seed)) == plain.load_batch(batch(live, seed)) == "loaded"
        assert runner.prepared == plain.prepared
        for name in NAMES:
            assert torch.equal(runner._prefill_static_buffers[name], plain._prefill_static_buffers[name])


def test_a_batch_takes_one_call_for_each_dtype_and_one_for_what_is_filled() -> None:
    runner = deferred()
    runner.load_batch(batch(2, 0))
    with Writes() as writes:
        runner.load_batch(batch(2, 1))
    assert writes.seen == {"aten._foreach_copy_": 2, "aten.fill_": 1}


def test_what_else_is_asked_of_a_vector_finds_all_that_was_noted() -> None:
    runner = Runner()
    defer(runner)
    load = runner.load_batch
    found: list[Any] = []

    def prepare() -> None:
        s = runner._prefill_static_buffers
        found.append((s["seq_lens"][:SLOTS].tolist(), s["orig_seq_lens"].dtype, s["seq_lens"][0].item(), list(s)))

    runner.prepare = prepare  # type: ignore[method-assign]
    given = batch(3, 5)
    load(given)
    assert found == [([*given.seq_lens.tolist(), 0], torch.int64, int(given.seq_lens[0]), list(NAMES))]


def test_a_batch_that_fails_leaves_sglangs_own_vectors_and_nothing_for_the_next() -> None:
    runner = deferred()
    real = runner._prefill_static_buffers
    runner.fails = True
    with pytest.raises(RuntimeError, match="no such batch"):
        runner.load_batch(batch(4, 0))
    assert runner._prefill_static_buffers is real
    runner.fails = False
    runner.load_batch(batch(1, 1))
    plain = Runner()
    plain.load_batch(batch(1, 1))
    assert runner.prepared == plain.prepared
