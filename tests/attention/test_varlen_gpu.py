"""FlashAttention inside torch against the oracle, alone and replayed by a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.attention.varlen import VarlenAttention
from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import BATCHES, SITE, Inputs, expected, inputs_for, poison_tail, static_batch

pytestmark = pytest.mark.gpu

BACKEND = VarlenAttention()
NAN = float("nan")
HALF = replace(SITE, dtype=torch.bfloat16, head_size=64, value_head_size=64, scale=0.125)
SITES: dict[str, AttentionSite] = {
    "causal": HALF,
    "two-sided": replace(HALF, right=-1),
    "causal window": replace(HALF, left=2),
    "two-sided window": replace(HALF, left=2, right=1),
    "right window": replace(HALF, right=2),
    "GQA": replace(HALF, kv_heads=2),
    "MQA": replace(HALF, kv_heads=1),
    "float16": replace(HALF, dtype=torch.float16, kv_heads=2),
    "scale": replace(HALF, scale=0.5),
    "head size 128": replace(HALF, head_size=128, value_head_size=128, kv_heads=2),
    "head size 256": replace(HALF, head_size=256, value_head_size=256, kv_heads=2),
    "head size 40": replace(HALF, head_size=40, value_head_size=40),
}
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


def run(site: AttentionSite, inputs: Inputs, static: StaticBatch) -> torch.Tensor:
    assert BACKEND.supports(site, torch.device("cuda", 0)) == []
    # The allocator gives the output these bytes.
    rubbish = [torch.full_like(inputs.q, NAN) for _ in range(3)]
    del rubbish
    return BACKEND.run(*inputs.tensors(), site, static)


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("padding", [0, 1, 5, 300])
def test_b02_real_rows_equal_the_oracle_and_padded_rows_are_zero(name: str, batch: str, padding: int) -> None:
    site, (q_lens, k_lens) = SITES[name], BATCHES[batch]
    q_rows, k_rows = sum(q_lens), sum(k_lens)
    inputs = inputs_for(site, q_rows + padding, k_rows + padding, device="cuda")
    want = expected(site, inputs, q_lens, k_lens)
    poison_tail(inputs, q_rows, k_rows, NAN)
    static = static_batch(q_lens, k_lens, tokens=q_rows + padding, slots=len(q_lens) + 6, max_k=512, device="cuda")
    got = run(site, inputs, static)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, **TOLERANCE)
    assert (got[q_rows:] == 0).all()


@pytest.mark.parametrize("name", SITES)
def test_b26_a_batch_without_real_tokens_is_all_zeros(name: str) -> None:
    site = SITES[name]
    inputs = inputs_for(site, 300, 300, device="cuda")
    poison_tail(inputs, 0, 0, NAN)
    got = run(site, inputs, static_batch([], tokens=300, slots=8, device="cuda"))
    assert (got == 0).all()


@pytest.mark.parametrize("name", ["causal", "GQA", "causal window"])
def test_many_slots_and_one_token_each(name: str) -> None:
    site = SITES[name]
    q_lens = [1] * 60
    inputs = inputs_for(site, 64, 64, device="cuda")
    want = expected(site, inputs, q_lens, q_lens)
    poison_tail(inputs, 60, 60, NAN)
    got = run(site, inputs, static_batch(q_lens, tokens=64, slots=64, max_k=2048, device="cuda"))
    torch.testing.assert_close(got.double(), want, **TOLERANCE)
    assert (got[60:] == 0).all()


@pytest.mark.parametrize("name", ["causal", "GQA", "causal window", "two-sided"])
def test_long_requests_equal_the_reference(name: str) -> None:
    site = SITES[name]
    q_lens, k_lens = [700, 1, 0, 900], [1200, 1, 30, 900]
    inputs = inputs_for(site, 2048, sum(k_lens), device="cuda")
    inputs.q[1601:] = NAN
    static = static_batch(q_lens, k_lens, tokens=2048, slots=32, max_k=2048, device="cuda")
    want = ReferenceAttention().run(*inputs.tensors(), site, static)
    got = run(site, inputs, static)
    torch.testing.assert_close(got, want, **TOLERANCE)
    assert (got[1601:] == 0).all()


A, B, EMPTY, FULL = [5, 1, 20], [2] * 12, [0, 0], [64]


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("captured", [A, FULL])
def test_one_graph_replays_any_batch_in_any_order(name: str, captured: Sequence[int]) -> None:
    site = SITES[name]
    tokens, slots = 64, 16
    live = inputs_for(site, tokens, tokens, device="cuda")
    static = static_batch(captured, tokens=tokens, slots=slots, max_k=64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(site, live, static)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = BACKEND.run(*live.tensors(), site, static)
    torch.cuda.synchronize()

    for seed, q_lens in enumerate([A, B, A, FULL, EMPTY, B, FULL, A]):
        fresh = inputs_for(site, tokens, tokens, device="cuda", seed=seed)
        rows = sum(q_lens)
        want = expected(site, fresh, q_lens, q_lens)
        poison_tail(fresh, rows, rows, NAN)
        staged = static_batch(q_lens, tokens=tokens, slots=slots, device="cuda")
        for field in ("cu_q", "cu_k", "q_lens", "k_lens", "pad_cu_q", "pad_cu_k", "num_real_tokens"):
            getattr(static, field).copy_(getattr(staged, field))
        for to, source in zip((live.q, live.k, live.v), (fresh.q, fresh.k, fresh.v), strict=True):
            to.copy_(source)
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.double(), want, **TOLERANCE)
        assert (out[rows:] == 0).all()


@pytest.mark.parametrize("name", ["causal", "GQA"])
def test_a_row_does_not_depend_on_the_bucket_or_on_other_requests(name: str) -> None:
    site = SITES[name]
    inputs = inputs_for(site, 256, 256, device="cuda")
    small = run(site, Inputs(*(None if t is None else t[:40] for t in inputs.tensors())),
                static_batch([30], tokens=40, slots=4, max_k=512, device="cuda"))  # fmt: skip
    large = run(site, inputs, static_batch([30, 200], tokens=256, slots=16, max_k=512, device="cuda"))
    assert torch.equal(small[:30], large[:30])


def test_planning_and_running_wait_for_nothing() -> None:
    site = SITES["GQA"]
    inputs = inputs_for(site, 64, 64, device="cuda")
    static = static_batch(A, tokens=64, slots=16, device="cuda")
    run(site, inputs, static)
    torch.cuda.set_sync_debug_mode("error")
    try:
        BACKEND.run(*inputs.tensors(), site, static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
