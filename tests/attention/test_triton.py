"""The kernel of our own: on a GPU, and on the CPU by Triton's interpreter (``TRITON_INTERPRET=1``, numpy below 2.4)."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile.attention.triton as module
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.attention.triton import KernelConfig, TritonAttention, choose_config, padded_size
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import BATCHES, FEATURES, SITE, Inputs, expected, inputs_for, poison_tail, static_batch

NAN = float("nan")
CUDA = torch.device("cuda", 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")
DEVICES = [
    pytest.param("cpu", marks=interpreted),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1")]),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SPLIT = KernelConfig(block_m=16, block_n=16, warps=4, stages=2, chunk=16, chunks=3)
FEW_ROWS = replace(SPLIT, one_loop=True)
CUTS = [pytest.param(SPLIT, id="many rows"), pytest.param(FEW_ROWS, id="few rows")]
H200 = (132, 232448)


def paged(inputs: Inputs, static: Any, k_lens: Sequence[int], page_size: int, *, max_k: int = 0, seed: int = 0) -> Any:
    """The same keys and values in pages, in a shuffled order; every other cell of the pages holds NaN."""
    need = [-(-n // page_size) for n in k_lens]
    ids = list(range(1, sum(need) + 4))
    random.Random(seed).shuffle(ids)
    width = max(1, *need, -(-max_k // page_size))
    table = torch.zeros(static.slots, width, dtype=torch.int32)
    k, v = (t.new_full((sum(need) + 4, page_size, *t.shape[1:]), NAN) for t in (inputs.k, inputs.v))
    start = 0
    for request, (n, count) in enumerate(zip(k_lens, need, strict=True)):
        table[request, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        j = torch.arange(n)
        page, offset = table[request][j // page_size].long().to(k.device), (j % page_size).to(k.device)
        k[page, offset], v[page, offset] = inputs.k[start : start + n], inputs.v[start : start + n]
        start += n
    cache: Any = SimpleNamespace(k=(None, k), v=(None, v), page_size=page_size)
    return replace(static, max_k=max(static.max_k, max_k), cache=cache, page_table=table.to(k.device))


def run(site: AttentionSite, inputs: Inputs, static: Any, backend: TritonAttention | None = None) -> Tensor:
    if inputs.q.is_cuda:
        assert TritonAttention().supports(site, CUDA) == []
        rubbish = [inputs.q.new_full((inputs.q.shape[0], site.heads, site.value_head_size), NAN) for _ in range(3)]
        del rubbish  # the allocator gives the output these bytes
    return (backend or TritonAttention()).run(*inputs.tensors(), site, static)


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


# What it declares.


def test_it_says_what_is_wrong_with_a_site_and_a_device() -> None:
    odd = replace(SITE, dtype=torch.float64, head_size=300, value_head_size=512, kv_heads=3)
    reasons = TritonAttention().supports(odd, torch.device("cpu"))
    assert reasons == [
        "the device is cpu; it runs on CUDA only",
        "dtype is torch.float64; it computes in float32, float16 and bfloat16",
        "head size 300 is above 256",
        "head size 512 is above 256",
        "4 query heads are no multiple of 3 key heads",
    ]


def test_a_missing_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert TritonAttention().supports(SITE, CUDA) == ["the package triton is not installed"]


def test_an_old_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert TritonAttention().supports(SITE, CUDA) == ["compute capability 7.5 is below 8.0"]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_declares_every_feature(feature: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_device_reasons", lambda device: [])
    assert TritonAttention().supports(replace(FEATURES[feature][0], dtype=dtype), CUDA) == []


def test_asking_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from fullgraph_compile.attention.triton import TritonAttention as T;"
        "from tests.attention.cases import SITE; before = 'triton' in sys.modules;"
        "T().supports(SITE, torch.device('cpu')); assert ('triton' in sys.modules) == before;"
        "assert 'fullgraph_compile.attention.triton_kernel' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())


# How it cuts the work.

LARGE = replace(SITE, heads=32, kv_heads=8, head_size=128, value_head_size=128, dtype=torch.bfloat16)


def test_few_tokens_with_long_keys_are_split_and_many_tokens_are_not() -> None:
    assert choose_config(LARGE, 30, 8192, *H200).chunk > 0
    assert choose_config(LARGE, 30, 32, *H200).chunk == 0  # no cache: no key range is long
    assert choose_config(LARGE, 2048, 8192, *H200).chunk == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 30, 128, 512, 2048, 16384])
@pytest.mark.parametrize("shared_memory", [101376, 232448])
def test_buffers_are_bounded_and_blocks_fit(dtype: torch.dtype, size: int, tokens: int, shared_memory: int) -> None:
    site = replace(LARGE, dtype=dtype, head_size=size, value_head_size=size)
    config = choose_config(site, tokens, 131072, 132, shared_memory)
    if config.chunk:
        assert config.chunks * tokens * site.heads * (size + 2) * 4 <= 40 * 2**20
    keys = 2 * config.block_n * config.stages
    assert config.stages == 1 or dtype.itemsize * size * (config.block_m + keys) <= shared_memory
    assert all(n & (n - 1) == 0 for n in (config.block_m, config.block_n, config.warps, config.chunk, config.chunks))


@pytest.mark.parametrize(("size", "padded"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128), (256, 256)])
def test_head_sizes_are_padded_to_a_power_of_two(size: int, padded: int) -> None:
    assert padded_size(size) == padded


# On a GPU only.

HALF = replace(LARGE, heads=8, kv_heads=2, scale=128**-0.5)


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
