"""The kernel of our own on a GPU: long requests, graphs that are replayed, and what a launch may not do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.attention.triton import TritonAttention
from tests.attention.cases import FEATURES, SITE, Inputs, expected, inputs_for, poison_tail, static_batch
from tests.attention.triton_runs import NAN, TOLERANCE, paged, run

HALF = replace(
    SITE, heads=8, kv_heads=2, head_size=128, value_head_size=128, dtype=torch.bfloat16, scale=128**-0.5
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pages", [False, True])
def test_long_requests_equal_the_reference(dtype: torch.dtype, pages: bool) -> None:
    for site in (replace(HALF, dtype=dtype), replace(HALF, dtype=dtype, left=300, softcap=20.0, sinks=True)):
        q_lens, k_lens = [700, 1, 0, 900], [1200, 1, 30, 900]
        inputs = inputs_for(site, 2048, sum(k_lens), device="cuda")
        inputs.q[1601:] = NAN
        static: Any = static_batch(q_lens, k_lens, tokens=2048, slots=32, max_k=2048, device="cuda")
        want = ReferenceAttention().run(*inputs.tensors(), site, static)
        if pages:
            static, site = paged(inputs, static, k_lens, 16), replace(site, index=1)
        got = run(site, inputs, static)
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert (got[1601:] == 0).all()


A, B, EMPTY, FULL = [5, 1, 20], [2] * 12, [0, 0], [64]


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["causal", "GQA", "two-sided window", "all at once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("captured", [A, EMPTY, FULL], ids=str)
def test_one_graph_replays_any_batch_in_any_order(feature: str, dtype: torch.dtype, captured: list[int]) -> None:
    site, backend = replace(FEATURES[feature][0], dtype=dtype, index=1), TritonAttention()
    tokens, slots, page_size, cells = 64, 16, 4, 2048

    def batch(q_lens: list[int], seed: int) -> tuple[Inputs, Any, Tensor]:
        k_lens = [n + (37 * i + 211 * seed) % 90 for i, n in enumerate(q_lens)]
        fresh = inputs_for(site, tokens, cells, device="cuda", seed=seed)
        want = expected(site, fresh, q_lens, k_lens)
        poison_tail(fresh, sum(q_lens), sum(k_lens), NAN)
        static = static_batch(q_lens, k_lens, tokens=tokens, slots=slots, device="cuda")
        return fresh, paged(fresh, static, k_lens, page_size, max_k=1024, seed=seed), want

    live, static, _ = batch(captured, 99)
    pools = [live.k.new_full((cells, page_size, *t.shape[1:]), NAN) for t in (live.k, live.v)]
    pools[1] = live.v.new_full((cells, page_size, *live.v.shape[1:]), NAN)
    for pool, source in zip(pools, (static.cache.k[1], static.cache.v[1]), strict=True):
        pool[: len(source)] = source
    static.cache.k, static.cache.v = (None, pools[0]), (None, pools[1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(site, live, static, backend)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = backend.run(*live.tensors(), site, static)
    for seed, q_lens in enumerate([A, B, A, FULL, EMPTY, B, FULL, A]):
        fresh, staged, want = batch(q_lens, seed)
        for field in ("cu_q", "cu_k", "q_lens", "k_lens", "num_real_tokens", "page_table"):
            getattr(static, field).copy_(getattr(staged, field))
        live.q.copy_(fresh.q)
        for to, source in ((live.sinks, fresh.sinks), (live.slopes, fresh.slopes)):
            if to is not None and source is not None:
                to.copy_(source)
        for pool, source in zip(pools, (staged.cache.k[1], staged.cache.v[1]), strict=True):
            pool.fill_(NAN)[: len(source)] = source
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), want, atol=bound, rtol=bound)
        assert (out[sum(q_lens) :] == 0).all()


@pytest.mark.gpu
def test_a_hundred_random_paged_batches_with_long_prefixes() -> None:
    pick, backend, site = random.Random(5), TritonAttention(), replace(HALF, index=1)
    for round_ in range(100):
        tokens = pick.choice([32, 128, 512])
        requests, left = pick.randint(1, 12), tokens
        q_lens = [0] * requests
        for i in range(requests):
            q_lens[i] = pick.randint(0, left) if i else pick.randint(1, max(1, left // 2))
            left -= q_lens[i]
        k_lens = [n + pick.choice([0, pick.randint(1, 300), pick.randint(1, 4096)]) for n in q_lens]
        inputs = inputs_for(site, tokens, sum(k_lens), device="cuda", seed=round_)
        inputs.q[sum(q_lens) :] = NAN
        static = static_batch(q_lens, k_lens, tokens=tokens, slots=16, max_k=8192, device="cuda")
        want = ReferenceAttention().run(*inputs.tensors(), site, static)
        got = run(site, inputs, paged(inputs, static, k_lens, pick.choice([1, 5, 16]), seed=round_), backend)
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
        assert (got[sum(q_lens) :] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [False, True])
def test_a_row_does_not_depend_on_other_requests(pages: bool) -> None:
    site, outs = replace(HALF, index=1), []
    for lens in ([30], [30, 90]):
        inputs = inputs_for(site, 128, 3000, device="cuda")
        k_lens = [n + 1300 * pages for n in lens]
        static: Any = static_batch(lens, k_lens, tokens=128, slots=16, max_k=4096, device="cuda")
        outs.append(run(site, inputs, paged(inputs, static, k_lens, 16) if pages else static))
    assert torch.equal(outs[0][:30], outs[1][:30])


@pytest.mark.gpu
def test_running_waits_for_nothing_and_no_buffer_is_made_in_a_capture() -> None:
    site, backend = replace(HALF, index=1), TritonAttention()
    inputs = inputs_for(site, 64, 500, device="cuda")
    static = paged(
        inputs, static_batch([20, 9], [400, 30], tokens=64, slots=16, max_k=4096, device="cuda"), [400, 30], 16
    )
    with pytest.raises(RuntimeError, match="once before it is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        backend.run(*inputs.tensors(), site, static)
    torch.cuda.synchronize()
    run(site, inputs, static, backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.run(*inputs.tensors(), site, static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
