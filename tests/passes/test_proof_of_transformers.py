"""The padding proof on bodies and heads from transformers, tiny and with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fullgraph_compile.ops as ops
from fullgraph_compile.passes.check_row_independence import check_row_independence
from tests.tracing import TOKENS, trace


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> Any:
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    out = ops.attention(q, k, v, None, None, q.size(-1) ** -0.5 if scaling is None else scaling, -1, 0, 0.0, -1)
    return out[None], None


def causal_lm(name: str) -> nn.Module:
    import transformers as hf
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("proof_test", attend)
    size: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 31, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
        "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16},
        "Mistral": {"sliding_window": 3},
        "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    }
    config = getattr(hf, f"{name}Config")(**size, **own.get(name, {}))
    model = (hf.AutoModelForMaskedLM if name == "Bert" else hf.AutoModelForCausalLM).from_config(config).eval()
    model.set_attn_implementation("proof_test")
    return model


def trace_model(model: nn.Module, backed: bool = False, **more: Any) -> tuple[GraphModule, sympy.Symbol]:
    ids, positions = torch.arange(TOKENS)[None], torch.arange(TOKENS)[None]
    with torch.no_grad():
        return trace(model, input_ids=ids, position_ids=positions, backed=backed, **more)


NAMES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3", "GPT2", "OPT", "Bert", "Mixtral", "Qwen3Moe")


@pytest.mark.parametrize("name", NAMES)
def test_transformers_body_and_head_are_proven(name: str) -> None:
    more = {} if name == "Bert" else {"use_cache": False}
    gm, token = trace_model(causal_lm(name), **more)
    proof = check_row_independence(gm, token)
    assert proof.padding_safe and proof.request_separable, str(proof)
    assert any(n.target is ops.attention for n in gm.graph.nodes)
    assert not proof.tainted


@pytest.mark.parametrize("name", ("Llama", "Mixtral"))
def test_a_backed_token_count_is_proven_alike(name: str) -> None:
    gm, token = trace_model(causal_lm(name), backed=True, use_cache=False)
    assert str(token).startswith("s")
    proof = check_row_independence(gm, token)
    assert proof.padding_safe and proof.request_separable, str(proof)


def test_logits_to_keep_taints_only_the_tail() -> None:
    gm, token = trace_model(causal_lm("Llama"), use_cache=False, logits_to_keep=1)
    proof = check_row_independence(gm, token)
    assert [r.op for r in proof.refusals] == ["getitem"] and "hidden_states[:, " in proof.refusals[0].source
    nodes = [n.name for n in gm.graph.nodes]
    site = nodes.index(next(n.name for n in gm.graph.nodes if n.target is ops.attention))
    assert all(nodes.index(name) > site for name in proof.tainted)
