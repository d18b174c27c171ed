"""A captured graph keeps every plain number that it saw; none of them may be one that changes between calls.

Page tables, and with them the fixed stride of their rows (B36), come with the KV cache.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason, ops
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.ops import AttentionSite
from tests.models import T2, Layer, tiny, tokens
from tests.reports.cases import (
    DRESSES,
    TAPE,
    Pair,
    Watched,
    either_way,
    equal,
    known_as,
    one_call,
    packed,
    pair,
    per_request,
)


@pytest.fixture(scope="module")
def t2() -> Pair:
    return pair(T2(), buckets=[4, 8, 16, 32, 64], request_slots=8)


def splits(n: int, most: int, dice: random.Random) -> list[int]:
    """``n`` tokens as at most ``most`` requests, in any order, some of them empty."""
    cuts = sorted(dice.randint(0, n) for _ in range(dice.randint(0, most - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


# -- bounds and layouts that are plain numbers -------------------------------------------------------------------------


def test_b27_the_longest_request_may_change_between_replays(t2: Pair) -> None:
    short, long = [8] * 5, [40]
    for poison in DRESSES:
        t2.dress(poison)
        for lengths in (short, long, short, long, long, short):
            t2.same(lengths, bucket=64)


def test_b27_every_number_that_attention_gets_is_a_bound_of_the_bucket(t2: Pair) -> None:
    assert {(r.rows, r.static.tokens, r.static.max_q, r.static.max_k) for r in t2.attention.runs if r.rows != 5} == {
        (b, b, b, 64) for b in (4, 8, 16, 32, 64)
    }


class TwoKernels(Watched):
    """Takes another kernel, and another layout of its metadata, where keys are many: offsets, or lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}
        self.planned_for: list[tuple[int, str]] = []
        self.ran_with: list[tuple[int, str]] = []

    @staticmethod
    def kernel(static: StaticBatch) -> str:
        return "offsets" if static.max_k > 32 else "lengths"

    def plan(self, batch: PrefillBatch, static: StaticBatch, sites: Sequence[AttentionSite]) -> None:
        super().plan(batch, static, sites)
        table = self.tables.setdefault(id(static), torch.zeros(static.slots + 1, dtype=torch.int32))
        table.fill_(2**20)
        if self.kernel(static) == "offsets":
            table.copy_(static.cu_k)
        else:
            table[1:].copy_(static.k_lens)
        self.planned_for.append((static.tokens, self.kernel(static)))

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Any, slopes: Any, site: Any, static: StaticBatch) -> Tensor:
        table = self.tables[id(static)]
        self.ran_with.append((static.tokens, self.kernel(static)))
        offsets = table if self.kernel(static) == "offsets" else nn.functional.pad(table[1:].cumsum(0), (1, 0))
        lengths = offsets.diff()
        read = StaticBatch(
            static.tokens, static.slots, static.max_q, static.max_k, offsets, offsets, lengths, lengths,
            static.pad_cu_q, static.pad_cu_k, static.num_real_tokens,
        )  # fmt: skip
        return super().run(q, k, v, sinks, slopes, site, read)


def test_b28_a_kernel_is_chosen_once_by_the_bound_of_the_capture() -> None:
    with known_as("two kernels", TwoKernels):
        two = pair(T2(), attention="two kernels", buckets=[8, 64])
    backend = two.attention
    assert set(backend.ran_with) == {(8, "offsets"), (64, "offsets")}
    for poison in DRESSES:
        two.dress(poison)
        for lengths, bucket in (([8], 8), ([8] * 5, 64), ([40], 64), ([8, 2], 64), ([3, 1], 8)):
            two.same(lengths, bucket=bucket)
    assert set(backend.planned_for) == set(backend.ran_with), "replays plan for the kernel that was captured"
    # At exact sizes both ask the same bound too, which is that of the batch.
    two.same([9] * 8)
    assert backend.planned_for[-1] == backend.ran_with[-1] == (72, "lengths")


class Kinds(T2):
    """Three kinds of attention in one body: causal, a window, two-sided."""

    def __init__(self) -> None:
        super().__init__(layers=3)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for layer, (left, right) in zip(self.layers, ((-1, 0), (2, 0), (-1, -1)), strict=True):
            assert isinstance(layer, Layer)
            q, k, v = layer.qkv(layer.norm1(x))[0].unflatten(-1, (3, layer.heads, -1)).unbind(1)
            a = ops.attention(q, k, v, None, None, q.shape[-1] ** -0.5, left, right, 0.0, -1)
            x = x + layer.out(a.flatten(1))[None]
        return self.norm(x)


def test_b29_a_graph_is_captured_with_keys_for_every_kind_of_attention() -> None:
    kinds = pair(Kinds(), buckets=[4, 8, 16], context_length=8)
    masks = ["causal", "causal window of 3", "two-sided"]
    assert [site.mask for site in kinds.report.sites] == masks
    watched = kinds.attention
    captures = [(lengths, static) for lengths, static in watched.planned if sum(lengths) == static.tokens]
    for bucket in (4, 8, 16):
        dummies = [lengths for lengths, static in captures if static.tokens == bucket]
        assert dummies
        assert all(1 <= n <= 8 for lengths in dummies for n in lengths)
        runs = [r for r in watched.runs if r.rows == bucket]
        assert {r.site.mask for r in runs} == set(masks)
        assert all(r.static.max_k >= 1 and r.static.max_q >= 1 for r in runs)
    for poison in DRESSES:
        kinds.dress(poison)
        for lengths, bucket in (([7], 8), ([8, 7, 1], 16), ([1], 4), ([7], 8)):
            kinds.same(lengths, bucket=bucket)


# -- what the model keeps in Python ------------------------------------------------------------------------------------


class Keeps(T2):
    """Keeps its positions and its last rows on itself; a later layer reads the positions from there."""

    positions: Tensor
    last: Tensor

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.positions = position_ids
        x = self.layers[0](self.embed(input_ids) + self.place(position_ids))
        self.last = self.layers[1](x + self.place(self.positions) * 0.5)
        return self.norm(self.last)


@pytest.fixture(scope="module", params=["fgc.compile", "torch.compile"])
def keeps(request: pytest.FixtureRequest) -> Pair:
    return either_way(Keeps(), request.param, buckets=(4, 8, 16))


def test_b31_positions_that_are_kept_on_the_module_are_those_of_the_call(keeps: Pair) -> None:
    for n in (5, 3, 9, 5, 3):
        equal(packed(keeps.body, tokens(n, seed=n), [n]), per_request(keeps.eager, tokens(n, seed=n), [n]))


def test_b32_what_a_call_keeps_on_the_module_is_never_an_old_value(keeps: Pair) -> None:
    for n in (5, 7, 3, 7):
        ids = tokens(n, seed=n)
        equal(packed(keeps.body, ids, [n]), per_request(keeps.eager, ids, [n]))
        equal(keeps.module.last, keeps.eager.last)
        equal(keeps.module.positions, keeps.eager.positions)


class Scaled(T2):
    scale = 2.0

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = (self.embed(input_ids) + self.place(position_ids)) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.parametrize(
    # Dynamo makes a number that has changed an input, and a size that is seen a third time is captured.
    ("way", "scales"),
    [("fgc.compile", (2.0, 3.0, 2.0)), ("torch.compile", (2.0, 3.0, 4.0, 5.0, 2.0))],
)
def test_a_python_number_of_the_module_is_never_stale(way: str, scales: tuple[float, ...]) -> None:
    scaled = either_way(Scaled(), way, buckets=(8,))
    for scale in scales:
        scaled.module.scale = scaled.eager.scale = scale
        equal(packed(scaled.body, tokens(5), [5]), per_request(scaled.eager, tokens(5), [5]))


class Branching(T2):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rows = super().forward(input_ids, position_ids)
        return rows if rows.shape[1] <= 8 else -rows


@pytest.mark.parametrize("way", ["fgc.compile", "torch.compile"])
def test_a_branch_on_the_token_count_is_taken_for_each_call(way: str) -> None:
    branching = either_way(Branching(), way, buckets=(8, 16))
    for n in (5, 7, 12, 20, 7, 12):
        equal(packed(branching.body, tokens(n), [n]), per_request(branching.eager, tokens(n), [n]))


def test_b33_rotary_scaling_that_reads_positions_on_the_host_runs_eagerly() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    body = tiny("Llama", rope_parameters=rope, max_position_embeddings=16)
    eager = copy.deepcopy(body)
    fgc.compile(body, buckets=[16, 64], **TAPE)
    for n in (11, 41, 11):
        got, want = (one_call(m, n, seed=n, use_cache=False)[0] for m in (body, eager))
        equal(got, want)
    report = fgc.report(body)
    assert report.fallbacks == {Reason.NOT_TRACED: 3}
    assert "branch" in report.details[Reason.NOT_TRACED]
    # The eager call would take several requests for one, so it is not made.
    with pytest.raises(fgc.FallbackError, match="2 requests"):
        packed(body, tokens(9), [4, 5])


# -- metadata of another batch -----------------------------------------------------------------------------------------


def test_b35_any_split_of_a_bucket_follows_any_other(t2: Pair) -> None:
    dice = random.Random(0)
    for i in range(30):
        t2.dress(DRESSES[i % 3])
        lengths = splits(dice.randint(5, 8), 4, dice)
        assert torch.isfinite(t2.same(lengths, seed=i, bucket=8)).all()


@pytest.mark.parametrize("way", ["fgc.compile", "torch.compile", "transformers"])
def test_b37_every_batch_is_staged_in_full_whichever_way_it_comes_in(way: str) -> None:
    """``Watched`` looks at each staged batch, all vectors and tails."""
    module, compiled_by = (tiny("Llama"), "fgc.compile") if way == "transformers" else (T2(), way)
    both = either_way(module, compiled_by, buckets=(4, 8, 16, 32), request_slots=4, attention="watched")
    body, eager, dice = both.body, both.eager, random.Random(1)
    for n in (5, 7):
        equal(packed(body, tokens(n), [n]), per_request(eager, tokens(n), [n]))
    watched, staged = both.attention, len(both.attention.planned)
    for n in range(2, 33):
        both.dress(DRESSES[n % 3])
        both.same(splits(n, min(4, n), dice), seed=n, bucket=next(b for b in (4, 8, 16, 32) if b >= n))
    assert len(watched.planned) == staged + 31
    both.same([9, 25, 3, 2, 1])  # at exact size
    assert len(watched.planned) == staged + 32
    for wrong in ([4, 5], [40]):
        with pytest.raises(ValueError, match="must be equal"):
            packed(body, tokens(8), wrong)
        both.same([4, 4], bucket=8)
