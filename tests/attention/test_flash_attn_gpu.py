"""FlashAttention's packages against the oracle, alone and replayed by a CUDA graph: those that are installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fullgraph_compile.attention.conformance import check_attention
from fullgraph_compile.attention.flash_attn import FlashAttnBackend
from fullgraph_compile.attention.flash_libraries import FlashAttention2, FlashAttention3, FlashAttention4, FlashLibrary
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import SITE, expected, inputs_for, static_batch
from tests.attention.replaying import Bucket, check, host_batch, queued_equal_one_by_one

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
HALF = replace(
    SITE, index=1, dtype=torch.bfloat16, heads=8, kv_heads=2, head_size=128, value_head_size=128, scale=128**-0.5
)  # fmt: skip


def kind_of(library: type[FlashLibrary]) -> type[FlashAttnBackend]:
    return type(library.__name__, (FlashAttnBackend,), {"libraries": (library,)})


@pytest.fixture(params=[FlashAttention3, FlashAttention4, FlashAttention2], ids=lambda kind: kind.package)
def kind(request: pytest.FixtureRequest) -> type[FlashAttnBackend]:
    found = kind_of(request.param)
    reasons = found().supports(HALF, CUDA)
    if reasons:
        pytest.skip("; ".join(reasons))
    return found


def test_the_battery_passes(kind: type[FlashAttnBackend]) -> None:
    found = check_attention(kind, "cuda")
    assert found.ok, str(found)
    print(found)


# name -> the site, and the site without the feature
FEATURES: dict[str, tuple[AttentionSite, AttentionSite]] = {
    "causal": (HALF, replace(HALF, right=-1)),
    "two-sided": (replace(HALF, right=-1), HALF),
    "scale": (replace(HALF, scale=0.5), HALF),
    "GQA": (HALF, replace(HALF, kv_heads=1)),
    "soft cap": (replace(HALF, softcap=0.7), HALF),
    "window": (replace(HALF, left=4), HALF),
    "slopes": (replace(HALF, slopes=True), HALF),
}


@pytest.mark.parametrize("page_size", [0, 16, 256])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_equals_the_oracle_and_differs_without_it(
    feature: str, page_size: int, kind: type[FlashAttnBackend]
) -> None:
    site, without = FEATURES[feature]
    reasons = kind().supports(site, CUDA) + (kind().supports_pages(page_size, CUDA) if page_size else [])
    if reasons:
        pytest.skip("; ".join(reasons))
    bucket = Bucket(kind(), site, page_size=page_size)
    bucket.capture()
    q_lens = [20, 0, 1, 30]
    work = bucket.work(q_lens, [45, 33, 300, 30] if page_size else None, seed=1)
    check(bucket.replay(work), work)
    plain = inputs_for(site, 64, 16 * 512 if page_size else 64, device="cuda", seed=1)
    if feature == "GQA":
        plain = replace(plain, k=plain.k[:, :1], v=plain.v[:, :1])
    dropped = expected(without, replace(plain, slopes=None), q_lens, work.batch.lengths)
    assert (dropped - work.want).abs().max() > 0.1, "without the feature the answer would be another one"


SPLITS = [[64], [16] * 4, [61, 1, 1, 1], [1, 63], [32, 32], [5, 1, 20], [2] * 12, [0, 0], [3]]


@pytest.mark.parametrize("captured", [[64], [5, 1, 20], [0, 0]], ids=str)
def test_b20_b25_one_graph_replays_any_batch_in_any_order(captured: list[int], kind: type[FlashAttnBackend]) -> None:
    bucket = Bucket(kind(), HALF)
    bucket.capture(bucket.work(captured, seed=99))
    works = [bucket.work(lens, seed=seed) for seed, lens in enumerate(SPLITS)]
    for at in [5, 0, 7, 6, 5, 3, 1, 8, 2, 4, 0, 7]:
        check(bucket.replay(works[at]), works[at])


def test_batches_queued_behind_a_long_kernel_equal_those_one_by_one(kind: type[FlashAttnBackend]) -> None:
    bucket = Bucket(kind(), HALF)
    bucket.capture()
    queued_equal_one_by_one(bucket, [bucket.work(lens, seed=i) for i, lens in enumerate(SPLITS[-5:])])


def test_staging_waits_for_nothing(kind: type[FlashAttnBackend]) -> None:
    bucket = Bucket(kind(), HALF)
    bucket.capture()
    works = [bucket.work([9, 20], seed=i) for i in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for work in works:
            bucket.replay(work)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [64, 128, 256])
def test_b18_requests_without_queries_or_keys_at_every_head_size(size: int, kind: type[FlashAttnBackend]) -> None:
    site = replace(HALF, head_size=size, value_head_size=size, scale=size**-0.5)
    if kind().supports(site, CUDA):
        pytest.skip("; ".join(kind().supports(site, CUDA)))
    bucket = Bucket(kind(), site)
    bucket.capture()
    for lens in ([0, 3, 2, 0], [0], [0, 64]):
        work = bucket.work(lens, seed=sum(lens))
        check(bucket.replay(work), work)


def test_many_rows_and_slots_and_calls_at_exact_size(kind: type[FlashAttnBackend]) -> None:
    bucket = Bucket(kind(), HALF, tokens=2048, slots=64)
    bucket.capture()
    for lens in ([700, 1, 0, 900], [30] * 60, [1] * 64):
        work = bucket.work(lens, seed=len(lens))
        check(bucket.replay(work), work)
    backend = kind()
    for lens in ([5, 0, 9], [1], [300, 17]):
        static = replace(static_batch(lens, device=CUDA), max_q=max(2, *lens))
        inputs = inputs_for(HALF, sum(lens), sum(lens), device="cuda")
        backend.plan(host_batch(lens), static, (HALF,))
        got = backend.run(*inputs.tensors(), HALF, static)
        torch.testing.assert_close(got.double(), expected(HALF, inputs, lens, lens), atol=2e-2, rtol=2e-2)
