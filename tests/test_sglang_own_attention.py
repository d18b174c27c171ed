"""Our own attention on a pool, a table and vectors laid out as SGLang's: what is read, written and refused.

On a CPU by the reference; with ``TRITON_INTERPRET=1`` by the kernels, in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fullgraph_compile.attention import kv_write
from fullgraph_compile.attention.triton import TritonAttention
from fullgraph_compile.integrations.sglang import own_attention, pool
from fullgraph_compile.integrations.sglang.attention import HostedCall, Sites
from fullgraph_compile.integrations.sglang.lengths import Lengths, lengths_kernel
from fullgraph_compile.integrations.sglang.own_attention import OwnAttention
from tests.attention.oracle import attend_requests

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
SLOTS, CONTEXT, TOKENS, CELLS, HEADS, KV_HEADS, SIZE = 4, 48, 24, 128, 4, 2, 16
NAMES = ("seq_lens", "extend_seq_lens", "req_pool_indices")


class Pool:
    """As SGLang's MHATokenToKVPool."""

    def __init__(self) -> None:
        self.dtype = self.store_dtype = torch.float32
        self.kv_cache_layout, self.size, self.page_size = "nhd", CELLS - 1, 1
        self.k = [torch.full((CELLS, KV_HEADS, SIZE), float("nan")) for _ in range(2)]
        self.v = [torch.full((CELLS, KV_HEADS, SIZE), float("nan")) for _ in range(2)]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k[layer_id], self.v[layer_id]


class FlashInferAttnBackend:
    full_cg_prefill_wrappers: Any = None

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> str:
        return "planned"


def module(layer_id: int, **more: Any) -> Any:
    return SimpleNamespace(
        **{
            "layer_id": layer_id, "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"),
            "sliding_window_size": -1, "use_irope": False, "logit_cap": 0.0, "logit_capping_method": "tanh",
            "pos_encoding_mode": "NONE", "xai_temperature_len": -1, "k_scale": None, "v_scale": None,
            "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "qk_head_dim": SIZE, "v_head_dim": SIZE, "scaling": 0.25,
            **more,
        }
    )  # fmt: skip


class Engine:
    """A prefill runner, and the requests that it has."""

    def __init__(self) -> None:
        self.pool, self.attention = Pool(), FlashInferAttnBackend()
        table = torch.full((9, CONTEXT), 2**30, dtype=torch.int32)
        self.model_runner = SimpleNamespace(
            attn_backend=self.attention, token_to_kv_pool=self.pool, sliding_window_size=None,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            model_config=SimpleNamespace(is_encoder_decoder=False), server_args=SimpleNamespace(),
        )  # fmt: skip
        self.vectors = {name: torch.full((8,), 7, dtype=torch.int64) for name in NAMES}
        self.runner: Any = SimpleNamespace(
            model_runner=self.model_runner, _prefill_static_buffers=self.vectors, _capture_req_slots=SLOTS,
            backend=SimpleNamespace(), _prepare_forward_metadata_for_replay=lambda *a: "prepared",
            load_batch=lambda batch: None,
        )  # fmt: skip
        self.static = SimpleNamespace(
            input_ids=torch.zeros(TOKENS, dtype=torch.int64), out_cache_loc=torch.zeros(TOKENS, dtype=torch.int64)
        )
        self.modules = [module(0), module(1)]

    def sites(self) -> Sites:
        sites = Sites(lambda *a: None)
        sites.modules, sites.dtypes, sites.batch = self.modules, [torch.float32] * 2, self.static
        return sites

    def load(self, rows: list[int], new: list[int], cells: list[list[int]]) -> None:
        """As SGLang's load_batch does: vectors with sentinels, write slots with zeros past the real ones."""
        for name in NAMES:
            self.vectors[name][:SLOTS] = 0
        self.static.out_cache_loc.zero_()
        at = 0
        for i, (row, n, held) in enumerate(zip(rows, new, cells, strict=True)):
            self.vectors["seq_lens"][i], self.vectors["extend_seq_lens"][i] = len(held), n
            self.vectors["req_pool_indices"][i] = row
            self.model_runner.req_to_token_pool.req_to_token[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
            self.static.out_cache_loc[at : at + n] = torch.tensor(held[len(held) - n :])
            at += n


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="slow"))])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(pool, "find", lambda name: Pool)
    if request.param == "triton":
        monkeypatch.setattr(TritonAttention, "supports", lambda self, site, device: [])
        monkeypatch.setattr(Lengths, "compute", Lengths.launch)
        monkeypatch.setattr(kv_write, "_index", kv_write._launch)
    return str(request.param)


def chosen(engine: Engine, name: str) -> tuple[OwnAttention, Sites]:
    # As at a capture: nothing has a slot yet.
    engine.load([0, 1], [TOKENS // 2] * 2, [[0] * (TOKENS // 2)] * 2)
    own, sites = OwnAttention(engine.runner, name), engine.sites()
    described = sites.described(torch.nn.Linear(1, 1))
    assert own.choose(sites, described), own.why
    return own, sites


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


class SWAKVPool(Pool):
    pass


class TboAttnBackend(FlashInferAttnBackend):
    pass


REFUSED: dict[str, tuple[str, str, Any]] = {
    "the KV pool is SWAKVPool": ("model_runner", "token_to_kv_pool", SWAKVPool()),
    "attention is TboAttnBackend": ("model_runner", "attn_backend", TboAttnBackend()),
    "the KV pool's layout is hnd": ("pool", "kv_cache_layout", "hnd"),
    "the KV cache holds torch.float8_e4m3fn": ("pool", "dtype", torch.float8_e4m3fn),
    "the model has sliding windows": ("model_runner", "sliding_window_size", 128),
    "ranks share a batch": ("runner", "require_mlp_tp_gather", True),
    "chunks of their own (MLA)": ("runner", "_capture_chunked_prefix", True),
    "the model has cross attention": ("config", "is_encoder_decoder", True),
    "deterministic inference": ("arguments", "enable_deterministic_inference", True),
    "split over ranks (dcp_size)": ("arguments", "dcp_size", 2),
    "layer 1 is not a decoder's self-attention": ("module", "is_cross_attention", True),
    "layer 1 has a window": ("module", "sliding_window_size", 64),
    "layer 1 caps its logits by sigmoid": ("module", "logit_capping_method", "sigmoid"),
    "layer 1 scales its keys and values": ("module", "k_scale", torch.ones(1)),
    "layer 1 keeps ((2, 32), (2, 16)) a token": ("module", "qk_head_dim", 32),
    "3 query heads are no multiple of 2 key heads": ("module", "tp_q_head_num", 3),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_our_attention_has_no_answer_to_is_left_to_sglang_by_name(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "find", lambda name: Pool)
    if "query heads" in words:
        monkeypatch.setattr(own_attention, "create_attention", _as_triton_would)
    engine = Engine()
    holder, name, value = REFUSED[words]
    engine.modules[1].logit_cap = 30.0
    holders = {
        "model_runner": engine.model_runner, "pool": engine.pool, "runner": engine.runner, "module": engine.modules[1],
        "config": engine.model_runner.model_config, "arguments": engine.model_runner.server_args,
    }  # fmt: skip
    setattr(holders[holder], name, value)
    sites = engine.sites()
    own = OwnAttention(engine.runner, "reference")
    with pytest.raises(RuntimeError, match="attention='reference' cannot be captured") as error:
        own.choose(sites, sites.described(torch.nn.Linear(1, 1)))
    assert words in str(error.value) and own.backend is None
    assert own.words.startswith("SGLang's ") and words in own.words


def _as_triton_would(name: str, sites: Any, device: torch.device) -> Any:
    from fullgraph_compile.attention import UnsupportedAttention

    reasons = [r for s in sites for r in TritonAttention().supports(s, device) if "heads" in r]
    raise UnsupportedAttention("triton", device, {"triton": tuple(reasons)})


def test_auto_leaves_other_devices_to_sglang_and_further_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "find", lambda name: Pool)
    engine = Engine()
    own, sites = OwnAttention(engine.runner, "auto"), engine.sites()
    assert not own.choose(sites, ()) and own.words == "SGLang's FlashInferAttnBackend (the device is cpu)"
    sites.extras = {"sinks"}
    with pytest.raises(RuntimeError, match="attention gets sinks"):
        OwnAttention(engine.runner, "reference").choose(sites, ())


@pytest.mark.parametrize("lost", ["_prefill_static_buffers", "_capture_req_slots"])
def test_a_runner_that_is_built_another_way_keeps_sglangs_attention(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "find", lambda name: Pool)
    engine = Engine()
    delattr(engine.runner, lost)
    with pytest.raises(RuntimeError, match=f"this SGLang is built another way: .*{lost}"):
        chosen(engine, "reference")


def test_a_backend_that_fails_at_its_first_run_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "find", lambda name: Pool)

    class Broken:
        name = "broken"

        def run(self, *args: Any) -> Any:
            raise MemoryError("out of shared memory")

    monkeypatch.setattr(own_attention, "create_attention", lambda *args: Broken())
    engine = Engine()
    with pytest.raises(RuntimeError, match="broken failed: MemoryError: out of shared memory"):
        chosen(engine, "reference")


def test_sglang_plans_nothing_for_graphs_that_we_attend_in_and_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "find", lambda name: Pool)

    class Ours:
        ours = True
        sglangs = frozenset({16})

    engine = Engine()
    own, _ = chosen(engine, "reference")
    engine.attention.full_cg_prefill_wrappers = ["wrapper"]
    with contextlib.ExitStack() as capture:
        own.take_over(capture)
        assert engine.attention.init_forward_metadata_out_graph(None, in_capture=True) is None
    assert engine.attention.init_forward_metadata_out_graph(None) == "planned"
    assert engine.attention.full_cg_prefill_wrappers is None
    prepare = engine.runner._prepare_forward_metadata_for_replay
    engine.runner.backend = Ours()
    engine.runner.backend.session = SimpleNamespace(own=own)
    assert prepare(None, None, 8) is None and prepare(None, None, SimpleNamespace(size=8)) is None
    assert prepare(None, None, 16) == "prepared"
    engine.runner.backend.session.own = OwnAttention(engine.runner, "sglang")
    assert prepare(None, None, 8) == "prepared"
    engine.runner.backend = SimpleNamespace()
    assert prepare(None, None, 8) == "prepared"
