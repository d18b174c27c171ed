"""A prefill runner, its KV pool and the requests it has, laid out as SGLang lays them out; SGLang is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.integrations.sglang.attention import Sites
from fullgraph_compile.integrations.sglang.own_attention import OwnAttention

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


def chosen(engine: Engine, name: str) -> tuple[OwnAttention, Sites]:
    # As at a capture: nothing has a slot yet.
    engine.load([0, 1], [TOKENS // 2] * 2, [[0] * (TOKENS // 2)] * 2)
    own, sites = OwnAttention(engine.runner, name), engine.sites()
    described = sites.described(torch.nn.Linear(1, 1))
    assert own.choose(sites, described), own.why
    return own, sites
