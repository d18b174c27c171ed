"""Our own attention on a pool, a table and vectors laid out as SGLang's: what is read and what is written.

On a CPU by the reference; with ``TRITON_INTERPRET=1`` by the kernels, in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from fullgraph_compile.attention import kv_write
from fullgraph_compile.attention.triton import TritonAttention
from fullgraph_compile.integrations.sglang import pool
from fullgraph_compile.integrations.sglang.attention import HostedCall
from fullgraph_compile.integrations.sglang.lengths import Lengths, lengths_kernel
from tests.attention.oracle import attend_requests
from tests.sglang_runner import CELLS, HEADS, KV_HEADS, SIZE, TOKENS, Engine, Pool, chosen

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="slow"))])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(pool, "find", lambda name: Pool)
    if request.param == "triton":
        monkeypatch.setattr(TritonAttention, "supports", lambda self, site, device: [])
        monkeypatch.setattr(Lengths, "compute", Lengths.launch)
        monkeypatch.setattr(kv_write, "_index", kv_write._launch)
    return str(request.param)


BATCHES = {
    "prefixes": ([3, 5, 1], [4, 1, 9], [list(range(20, 34)), list(range(40, 47)), list(range(60, 69))]),
    "one after many": ([2], [11], [list(range(80, 97))]),
    "all slots": ([1, 2, 3, 4], [6, 6, 6, 6], [list(range(7 * i + 1, 7 * i + 7)) for i in range(4)]),
    "a shared prefix": ([6, 7], [2, 3], [[*range(30, 40), 90, 91], [*range(30, 40), 92, 93, 94]]),
}


def test_each_batch_reads_its_own_slots_and_writes_where_it_was_told(backend: str) -> None:
    engine = Engine()
    own, sites = chosen(engine, backend)
    generator = torch.Generator().manual_seed(0)
    for name in ["prefixes", "one after many", "prefixes", "all slots", "a shared prefix", "prefixes"]:
        rows, new, cells = BATCHES[name]
        engine.load(rows, new, cells)
        real = sum(new)
        for layer, call in enumerate([HostedCall(i, (), True, {}, HEADS * SIZE) for i in range(2)]):
            used = sorted({c for held in cells for c in held})
            for cache in (engine.pool.k[layer], engine.pool.v[layer]):
                cache.fill_(float("nan"))
                cache[used] = torch.randn(len(used), KV_HEADS, SIZE, generator=generator)
            wide = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator)
            wide[real:] = float("nan")
            q, k, v = wide.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], 1)
            want = [t[layer].clone() for t in (engine.pool.k, engine.pool.v)]
            for cache, given in zip(want, (k, v), strict=True):
                cache[engine.static.out_cache_loc[:real]] = given[:real].view(-1, KV_HEADS, SIZE)
            if layer == 0:
                sites.own = own
                sites.begin()
            got = sites.call(call, [q, k, v])
            for cache, expected in zip((engine.pool.k[layer], engine.pool.v[layer]), want, strict=True):
                assert torch.equal(cache[1:].nan_to_num(-9.0), expected[1:].nan_to_num(-9.0))
            keys, values = (torch.cat([t[held] for held in cells]) for t in want)
            attended = attend_requests(
                q[:real].reshape(-1, HEADS, SIZE), keys, values, None, None, scale=0.25, left=-1, right=0, softcap=0.0,
                q_lens=new, k_lens=[len(held) for held in cells],
            )  # fmt: skip
            assert got.shape == (TOKENS, HEADS * SIZE)
            torch.testing.assert_close(got[:real].double(), attended.flatten(1), atol=1e-5, rtol=1e-5)
            assert (got[real:] == 0).all()


def test_a_call_that_saves_nothing_reads_what_another_wrote(backend: str) -> None:
    engine = Engine()
    own, _ = chosen(engine, backend)
    rows, new, cells = BATCHES["prefixes"]
    engine.load(rows, new, cells)
    for cache in (engine.pool.k[1], engine.pool.v[1]):
        cache.copy_(torch.randn(CELLS, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(1)))
    before = engine.pool.k[1].clone()
    q = torch.randn(TOKENS, HEADS * SIZE, generator=torch.Generator().manual_seed(2))
    own.begin(engine.static)
    got = own.attend(HostedCall(1, (), False, {}, HEADS * SIZE), q, None, None)
    keys, values = (torch.cat([t[1][held] for held in cells]) for t in (engine.pool.k, engine.pool.v))
    want = attend_requests(
        q[:14].view(-1, HEADS, SIZE), keys, values, None, None, scale=0.25, left=-1, right=0, softcap=0.0, q_lens=new,
        k_lens=[len(held) for held in cells],
    )  # fmt: skip
    torch.testing.assert_close(got[:14].double(), want.flatten(1), atol=1e-5, rtol=1e-5)
    assert torch.equal(engine.pool.k[1], before)


@pytest.mark.parametrize("slots", [1, 3, 16, 40])
@pytest.mark.parametrize(
    "way", ["torch", pytest.param("kernel", marks=pytest.mark.skipif(not INTERPRETED, reason="-"))]
)
def test_lengths_are_rewritten_in_full(slots: int, way: str) -> None:
    new, total = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    lengths = Lengths(new, total, slots)
    assert way == "torch" or lengths_kernel() is not None
    for live in (slots, 1, slots):
        for vector in (lengths.cu_q, lengths.cu_k, lengths.q_lens, lengths.k_lens, lengths.real):
            assert vector.data_ptr() % 16 == 0
            vector.fill_(2**30)
        new.fill_(99)
        total.fill_(99)
        new[:slots], total[:slots] = 0, 0
        new[:live], total[:live] = torch.arange(live) + 1, 3 * torch.arange(live) + 5
        (lengths.launch if way == "kernel" else lengths.compute)()
        for lens, ends, given in ((lengths.q_lens, lengths.cu_q, new), (lengths.k_lens, lengths.cu_k, total)):
            assert lens.tolist() == given[:slots].tolist()
            assert ends.tolist() == [int(given[:i].sum()) for i in range(slots + 1)]
        assert lengths.real.tolist() == [int(new[:slots].sum())]
