"""Which graphs of SGLang our own attention attends in, and which are left to SGLang's, for a reason by name."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullgraph_compile.attention.triton import TritonAttention
from fullgraph_compile.integrations.sglang import own_attention, pool
from fullgraph_compile.integrations.sglang.own_attention import OwnAttention
from tests.sglang_runner import Engine, FlashInferAttnBackend, Pool, chosen


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
