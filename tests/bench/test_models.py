"""The bodies that are measured: what their weights are taken to be, and which folders are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fullgraph_compile.bench.models import projections

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0,
}  # fmt: skip
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16


def on_meta(name: str, **changes: Any) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def test_the_weights_of_gpt2_are_those_of_its_conv1d() -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes)
    with torch.device("meta"):
        assert projections(transformers.GPT2Model(config)) == 2 * (4 * 32 * 32 + 2 * 32 * 128)


@pytest.mark.parametrize(
    ("name", "changes", "experts"),
    [
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 2 * 3 * 32 * 64),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 9}, 4 * 3 * 32 * 64),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 3}, 3 * 3 * 32 * 16),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 1}, 1 * 3 * 32 * 64),
    ],
)
def test_of_experts_those_of_one_token_are_counted(name: str, changes: dict[str, int], experts: int) -> None:
    router = 4 * 32
    assert projections(on_meta(name, **changes)) == 2 * (ATTENTION + router + experts)


def test_a_matrix_of_three_dims_that_holds_no_experts_is_counted_whole() -> None:
    body = on_meta("XLNet", d_model=32, n_layer=2, n_head=4, d_inner=64)
    relative = 5 * 32 * 32
    assert projections(body) == pytest.approx(2 * (relative + 2 * 32 * 64), rel=0.01)
