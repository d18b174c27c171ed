"""FlashInfer's kernels against the oracle, alone and replayed by a CUDA graph.

FlashInfer builds its kernels first: for FA2 in bf16 those of head size 64 plain, with a window, a soft cap and slopes,
and the whole battery adds window with cap, head sizes 128 and 256, and fp16; the same for FA3, which has no slopes.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from dataclasses import replace

import pytest
import torch

from fullgraph_compile.attention.conformance import check_attention
from fullgraph_compile.attention.flashinfer import FlashInferAttention, FlashInferFA2, FlashInferFA3
from fullgraph_compile.attention.probes import probes
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import HALF, expected, inputs_for, static_batch
from tests.attention.replaying import Bucket, check, host_batch, queued_equal_one_by_one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"),
]

CUDA = torch.device("cuda", 0)
KERNELS = [pytest.param(FlashInferFA2, id="fa2"), pytest.param(FlashInferFA3, id="fa3")]
# What needs kernels that are built for it alone.
BUILT_APART = ("window", "soft cap", "ALiBi slopes", "features together", "heads of", "float16")
# name -> the site, and the site without the feature
FEATURES: dict[str, tuple[AttentionSite, AttentionSite]] = {
    "causal": (HALF, replace(HALF, right=-1)),
    "two-sided": (replace(HALF, right=-1), HALF),
    "scale": (replace(HALF, scale=0.5), HALF),
    "GQA": (HALF, replace(HALF, kv_heads=1)),
    "window": (replace(HALF, left=4), HALF),
    "soft cap": (replace(HALF, softcap=0.7), HALF),
    "slopes": (replace(HALF, slopes=True), HALF),
}


@pytest.mark.parametrize("backend", KERNELS)
def test_the_battery_of_one_build_passes(backend: type[FlashInferAttention]) -> None:
    battery = [p for p in probes(lambda changes: True, ()) if not p.name.startswith(BUILT_APART)]
    names = {p.name if where == "packed" or len(p.layouts) == 1 else f"{p.name}, paged"
             for p in battery for where in p.layouts}  # fmt: skip
    found = check_attention(backend, "cuda", torch.bfloat16, only=names)
    assert found.ok and not found.unsupported, str(found)
    print(found)


@pytest.mark.parametrize("backend", KERNELS)
def test_the_whole_battery_passes(backend: type[FlashInferAttention]) -> None:
    found = check_attention(backend, "cuda")
    assert found.ok, str(found)
    print(found)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", KERNELS)
def test_each_feature_equals_the_oracle_and_differs_without_it(
    backend: type[FlashInferAttention], feature: str, page_size: int
) -> None:
    site, without = FEATURES[feature]
    if backend().supports(site, CUDA):
        pytest.skip("; ".join(backend().supports(site, CUDA)))
    bucket = Bucket(backend(), site, page_size=page_size)
    bucket.capture()
    q_lens = [20, 0, 1, 30]
    work = bucket.work(q_lens, [45, 33, 300, 30] if page_size else None, seed=1)
    got = bucket.replay(work)
    check(got, work)
    plain = inputs_for(site, 64, 16 * 512 if page_size else 64, device="cuda", seed=1)
    if feature == "GQA":
        plain = replace(plain, k=plain.k[:, :1], v=plain.v[:, :1])
    dropped = expected(without, replace(plain, slopes=None), q_lens, work.batch.lengths)
    assert (dropped - work.want).abs().max() > 0.1, "without the feature the answer would be another one"


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("backend", KERNELS)
def test_half_precision_equals_the_oracle(backend: type[FlashInferAttention], page_size: int) -> None:
    bucket = Bucket(backend(), replace(HALF, dtype=torch.float16), page_size=page_size)
    bucket.capture()
    for seed, (q_lens, k_lens) in enumerate([([20, 0, 1, 30], [45, 33, 300, 30]), ([64], [64]), ([1, 1], [400, 1])]):
        work = bucket.work(q_lens, k_lens if page_size else None, seed=seed)
        check(bucket.replay(work), work)


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("backend", KERNELS)
def test_b20_one_graph_replays_any_batch_in_any_order(backend: type[FlashInferAttention], page_size: int) -> None:
    bucket = Bucket(backend(), HALF, page_size=page_size)
    bucket.capture()
    splits = [[64], [16] * 4, [61, 1, 1, 1], [1, 63], [32, 32], [5, 1, 20], [2] * 12, [0, 0], [3]]
    works = [
        bucket.work(lens, [n + 57 * i % 400 for i, n in enumerate(lens)] if page_size else None, seed=seed)
        for seed, lens in enumerate(splits)
    ]
    for at in [5, 0, 7, 6, 5, 3, 1, 8, 2, 4, 0, 7]:
        check(bucket.replay(works[at]), works[at])


@pytest.mark.parametrize("backend", KERNELS)
def test_few_tokens_after_long_prefixes_equal_the_oracle(backend: type[FlashInferAttention]) -> None:
    bucket = Bucket(backend(), HALF, page_size=16, max_k=4224, slots=4)
    bucket.capture()
    for lens, keys in ([8, 1], [4104, 4097]), ([64], [4160]), ([1, 1, 1, 1], [1, 4096, 17, 1000]):
        work = bucket.work(lens, keys, seed=sum(keys))
        check(bucket.replay(work), work)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("backend", KERNELS)
def test_batches_queued_behind_a_long_kernel_equal_those_one_by_one(
    backend: type[FlashInferAttention], page_size: int
) -> None:
    bucket = Bucket(backend(), HALF, page_size=page_size)
    bucket.capture()
    lens = [[64], [5, 1, 20], [2] * 12, [0, 33], [3]]
    works = [bucket.work(n, [x + 41 for x in n] if page_size else None, seed=i) for i, n in enumerate(lens)]
    queued_equal_one_by_one(bucket, works)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("backend", KERNELS)
def test_b21_staging_waits_for_nothing(backend: type[FlashInferAttention], page_size: int) -> None:
    bucket = Bucket(backend(), HALF, page_size=page_size)
    bucket.capture()
    works = [bucket.work([9, 20], seed=i) for i in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for work in works:
            bucket.replay(work)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", KERNELS)
def test_b19_a_small_batch_after_a_big_one_equals_that_of_a_fresh_backend(backend: type[FlashInferAttention]) -> None:
    used, fresh = (Bucket(backend(), HALF, page_size=16) for _ in range(2))
    for bucket in (used, fresh):
        bucket.capture()
    big, small = used.work([4] * 16, [512] * 16), used.work([3], [20], seed=1)
    used.replay(big)
    assert torch.equal(used.replay(small), fresh.replay(small))


@pytest.mark.parametrize("backend", KERNELS)
def test_b68_the_workspace_stays_where_it_is(backend: type[FlashInferAttention]) -> None:
    one = backend()
    buckets = [Bucket(one, HALF, tokens=n, page_size=16) for n in (256, 64)]
    for bucket in buckets:
        bucket.capture()
    made = [t.data_ptr() for t in one._floats[CUDA]._made]
    for bucket in buckets:
        work = bucket.work([1] * 16, [512] * 16)
        check(bucket.replay(work), work)
    assert [t.data_ptr() for t in one._floats[CUDA]._made] == made


@pytest.mark.parametrize("backend", KERNELS)
def test_calls_at_exact_size_need_no_graph_and_leave_nothing_behind(backend: type[FlashInferAttention]) -> None:
    one = backend()
    for lens in ([5, 0, 9], [1], [300, 17]):
        static = replace(static_batch(lens, device=CUDA), max_q=max(2, *lens))
        inputs = inputs_for(HALF, sum(lens), sum(lens), device="cuda")
        one.plan(host_batch(lens), static, (HALF,))
        got = one.run(*inputs.tensors(), HALF, static)
        torch.testing.assert_close(got.double(), expected(HALF, inputs, lens, lens), atol=2e-2, rtol=2e-2)
        del static
    gc.collect()
    assert len(one._calls) == 0


@pytest.mark.parametrize("backend", KERNELS)
def test_host_time_of_a_plan(backend: type[FlashInferAttention]) -> None:
    bucket = Bucket(backend(), HALF, page_size=16)
    bucket.capture()
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(200):
        bucket.backend.plan(bucket.live.batch, bucket.live.static, (bucket.site,))
    host = (time.perf_counter() - before) / 200
    print(f"{backend.kernels}: plan takes {host * 1e6:.0f} us of the host")
    assert host < 1e-3
