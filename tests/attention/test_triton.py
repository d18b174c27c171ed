"""What the kernel of our own computes: on a GPU, and on the CPU by Triton's interpreter.

The interpreter needs ``TRITON_INTERPRET=1`` and numpy below 2.4.
"""

from __future__ import annotations

import importlib.util
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import fullgraph_compile.attention.triton as module
from fullgraph_compile.attention.triton import KernelConfig, TritonAttention
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import BATCHES, FEATURES, SITE, Inputs, expected, inputs_for, poison_tail, static_batch
from tests.attention.triton_runs import NAN, TOLERANCE, paged, run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")
DEVICES = [
    pytest.param("cpu", marks=interpreted),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1")]),
]
SPLIT = KernelConfig(block_m=16, block_n=16, warps=4, stages=2, chunk=16, chunks=3)
FEW_ROWS = replace(SPLIT, one_loop=True)
CUTS = [pytest.param(SPLIT, id="many rows"), pytest.param(FEW_ROWS, id="few rows")]


def check(
    site: AttentionSite,
    q_lens: list[int],
    k_lens: list[int],
    device: str,
    *,
    page_size: int = 0,
    padding: int = 7,
    max_k: int = 0,
) -> None:
    q_rows, k_rows = sum(q_lens), sum(k_lens)
    inputs = inputs_for(site, q_rows + padding, k_rows + padding, device=device)
    want = expected(site, inputs, q_lens, k_lens)
    poison_tail(inputs, q_rows, k_rows, NAN)
    slots = len(q_lens) + min(padding, 3)
    static: Any = static_batch(q_lens, k_lens, tokens=q_rows + padding, slots=slots, device=device)
    if page_size:
        static = paged(inputs, static, k_lens, page_size, max_k=max_k)
        site = replace(site, index=1)
        inputs.k.fill_(NAN)  # only the cache may be read
        inputs.v.fill_(NAN)
    got = run(site, inputs, static)
    assert got.shape == (q_rows + padding, site.heads, site.value_head_size) and got.is_contiguous()
    assert got.dtype is site.dtype
    bound = TOLERANCE[site.dtype]
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=bound)
    assert (got[q_rows:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_equals_the_oracle(feature: str, dtype: torch.dtype, device: str) -> None:
    site = replace(FEATURES[feature][0], dtype=dtype)
    if device == "cpu" and dtype is not torch.float32:
        pytest.skip("dtypes are the GPU's part")
    for name in BATCHES if device == "cuda" else ["prefixes", "fewer keys than queries"]:
        check(site, *BATCHES[name], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cut", CUTS)
def test_each_feature_equals_the_oracle_from_pages_and_with_split_keys(
    cut: KernelConfig, feature: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = replace(FEATURES[feature][0], dtype=dtype)
    if device == "cpu" and dtype is not torch.float32:
        pytest.skip("dtypes are the GPU's part")
    monkeypatch.setattr(module, "choose_config", lambda *_: cut)
    check(site, [3, 6, 0, 1, 4, 5], [40, 6, 9, 61, 0, 3], device, page_size=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("cut", [pytest.param(None, id="whole"), *CUTS])
def test_pages_of_any_size(
    page_size: int, cut: KernelConfig | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = replace(SITE, kv_heads=2)
    if cut is not None:
        monkeypatch.setattr(module, "choose_config", lambda *_: cut)
    for name in ("prefixes", "empty requests", "no keys"):
        check(site, *BATCHES[name], device, page_size=page_size)


def in_an_engines_table(static: Any) -> Any:
    """The same pages in the rows of a table that knows more requests; unused slots name the engine's padding row 0."""
    slots, width = static.page_table.shape
    rows = torch.tensor([*random.Random(3).sample(range(1, slots + 9), slots)])
    table = torch.full((slots + 9, width + 5), 2**30, dtype=torch.int32)
    table[rows, :width] = static.page_table.cpu()
    live = int((static.q_lens > 0).sum())
    assert (static.q_lens[:live] > 0).all()
    rows[live:] = 0
    device = static.page_table.device
    return replace(static, page_table=table.to(device), table_rows=rows.to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("cut", [pytest.param(None, id="whole"), *CUTS])
def test_pages_are_found_in_the_rows_of_an_engines_own_table(
    page_size: int, cut: KernelConfig | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = replace(SITE, kv_heads=2, index=1)
    if cut is not None:
        monkeypatch.setattr(module, "choose_config", lambda *_: cut)
    q_lens, k_lens = [3, 1, 20, 7], [40, 1, 33, 7]
    inputs = inputs_for(site, 40, sum(k_lens), device=device)
    want = expected(site, inputs, q_lens, k_lens)
    static = paged(inputs, static_batch(q_lens, k_lens, tokens=40, slots=7, device=device), k_lens, page_size)
    poison_tail(inputs, sum(q_lens), 0, NAN)
    got = run(site, inputs, in_an_engines_table(static))
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    assert (got[sum(q_lens) :] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (5, 5)])
@pytest.mark.parametrize("sizes", [(1, 1), (40, 40), (192, 128), (80, 256)])
def test_any_group_and_head_size(heads: tuple[int, int], sizes: tuple[int, int], device: str) -> None:
    site = replace(SITE, heads=heads[0], kv_heads=heads[1], head_size=sizes[0], value_head_size=sizes[1])
    check(replace(site, scale=sizes[0] ** -0.5), [9, 30], [20, 30], device)


@pytest.mark.parametrize("device", DEVICES)
def test_b26_a_batch_without_real_tokens_is_all_zeros(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(SITE, [0, 0], [0, 0], device, padding=70)
    monkeypatch.setattr(module, "choose_config", lambda *_: SPLIT)
    check(SITE, [0, 0], [0, 30], device, page_size=4, padding=70)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_may_be_a_slice_of_a_wider_tensor(device: str) -> None:
    site = replace(SITE, kv_heads=2)
    inputs = inputs_for(site, 11, 11, device=device)
    joined = torch.cat([inputs.q.flatten(1), inputs.k.flatten(1), inputs.v.flatten(1)], dim=1)
    q, k, v = (t.unflatten(1, (-1, 16)) for t in joined.split([64, 32, 32], dim=1))
    got = run(site, Inputs(q, k, v, None, None), static_batch([4, 7], device=device))
    torch.testing.assert_close(got.double(), expected(site, inputs, [4, 7], [4, 7]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sink", [-200.0, 30.0, 200.0])
def test_a_sink_of_any_size(sink: float, device: str) -> None:
    site = replace(SITE, sinks=True)
    sinks = torch.full((site.heads,), sink, device=device)
    inputs = replace(inputs_for(site, 9, 9, device=device), sinks=sinks)
    got = run(site, inputs, static_batch([4, 5], device=device))
    torch.testing.assert_close(got.double(), expected(site, inputs, [4, 5], [4, 5]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_broken_request_breaks_no_other(value: float, device: str) -> None:
    site = replace(SITE, kv_heads=2)
    inputs = inputs_for(site, 12, 12, device=device)
    want = expected(site, inputs, [4, 5, 3], [4, 5, 3])
    inputs.v[6] = value
    got = run(site, inputs, static_batch([4, 5, 3], device=device)).double()
    others = [*range(4), *range(9, 12)]
    torch.testing.assert_close(got[others], want[others], atol=1e-5, rtol=1e-5)
    assert not got[6:9].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", CUTS)
def test_counts_are_zero_again_after_each_launch(
    cut: KernelConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "choose_config", lambda *_: cut)
    site, backend = replace(SITE, kv_heads=2), TritonAttention()
    inputs = inputs_for(site, 6, 90, device=device)
    static = paged(inputs, static_batch([2, 4], [60, 30], device=device), [60, 30], 8)
    first, second = (run(replace(site, index=1), inputs, static, backend) for _ in range(2))
    assert torch.equal(first, second)
    counts = backend._buffers[first.device, ("arrived",)]
    assert len(counts) == 1 and not counts[0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", CUTS)
def test_equal_sites_share_a_list_of_work_and_each_pass_makes_it_anew(
    cut: KernelConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "choose_config", lambda *_: cut)
    backend, site = TritonAttention(), replace(SITE, kv_heads=2)
    sites = [site, replace(site, index=1), replace(site, index=2, left=3), replace(site, index=3)]
    inputs = inputs_for(site, 12, 12, device=device)
    for lens in ([5, 7], [2, 1, 9], [12]):
        static = static_batch(lens, tokens=12, slots=4, device=device)
        for one in sites:
            got = run(one, inputs, static, backend)
            torch.testing.assert_close(got.double(), expected(one, inputs, lens, lens), atol=1e-5, rtol=1e-5)


def test_a_pass_begins_at_its_first_site_or_with_other_metadata() -> None:
    backend, site = TritonAttention(), SITE
    first, second, other = (replace(site, index=i) for i in (0, 2, 1))
    other = replace(other, left=4)
    one, two = static_batch([3]), static_batch([2])
    passes = [(first, one), (other, one), (second, one), (first, one), (second, one), (second, two), (first, two)]
    assert [backend._begins(*run) for run in passes] == [True, True, False, True, False, True, True]
    assert backend._begins(second, replace(two)), "equal metadata that lies elsewhere is other metadata"
