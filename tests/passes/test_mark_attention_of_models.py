"""Models of transformers on their stock attention are marked as what they are, and compute what eager computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from fullgraph_compile.passes.common import op_name
from fullgraph_compile.passes.mark_attention import mark_attention
from tests.passes.direct_attention import attention_by, dense_attention, run
from tests.tracing import TOKENS, trace


@pytest.fixture(autouse=True)
def direct_attention() -> Iterator[None]:
    with attention_by(dense_attention):
        yield


SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
SHORT: dict[str, Any] = {**GROUPED, "num_hidden_layers": 1}

MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], int, str]] = {
    "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)), ["causal"] * 2, 2, "positions"),
    "qwen2": (lambda: hf.Qwen2Model(hf.Qwen2Config(**SHORT)), ["causal"], 2, "positions"),
    "qwen3": (lambda: hf.Qwen3Model(hf.Qwen3Config(**SHORT, head_dim=8)), ["causal"], 2, "positions"),
    "mistral": (lambda: hf.MistralModel(hf.MistralConfig(**SHORT, sliding_window=4)), ["causal window of 4"], 2,
                "positions"),
    # The stock sdpa attention of transformers leaves the soft cap out, so the site has none.
    "gemma2": (lambda: hf.Gemma2Model(hf.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=4, query_pre_attn_scalar=8, attn_implementation="sdpa")),
               ["causal window of 4", "causal"], 2, "positions"),
    "phi3": (lambda: hf.Phi3Model(hf.Phi3Config(**SHORT, sliding_window=262144)), ["causal window of 262144"], 2,
             "positions"),
    "gpt2": (lambda: hf.GPT2Model(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, bos_token_id=1,
                                                eos_token_id=2)), ["causal"] * 2, 4, "positions"),
    "opt": (lambda: hf.OPTModel(hf.OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
                                             vocab_size=97, word_embed_proj_dim=32, max_position_embeddings=64)),
            ["causal"] * 2, 4, "one"),
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SMALL), add_pooling_layer=False), ["two-sided"] * 2, 4, "one"),
    "modernbert": (lambda: hf.ModernBertModel(hf.ModernBertConfig(**SMALL, local_attention=6, cls_token_id=1,
                                                                  sep_token_id=2)),
                   ["two-sided", "two-sided window of 3+3"], 4, "one"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_stock_transformers_models_are_marked_and_equal_eager(name: str) -> None:
    build, masks, kv_heads, requests = MODELS[name]
    if name == "gemma2" and not hf.Gemma2PreTrainedModel._supports_sdpa:
        pytest.skip("this transformers does not run Gemma 2 on its sdpa attention: that leaves the soft cap out")
    model = build().eval()
    for parameter in model.parameters():
        # Weights as they are drawn make attention nearly uniform: a wrong mask would hardly show.
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    keywords: dict[str, Any] = {} if "bert" in name else {"use_cache": False}
    ids, run_of_one = torch.randint(3, 97, (1, TOKENS)), torch.arange(TOKENS)[None]
    with torch.no_grad():
        gm, token = trace(model, backed=True, input_ids=ids, position_ids=run_of_one, **keywords)
    marked = mark_attention(gm, token)

    assert not marked.refusals
    assert [site.mask for site in marked.sites] == masks
    assert [(s.index, s.heads, s.kv_heads, s.head_size, s.value_head_size) for s in marked.sites] == [
        (i, 4, kv_heads, 8, 8) for i in range(len(masks))
    ]
    assert len({s.module for s in marked.sites}) == len(masks)
    assert marked.requests == requests
    assert (marked.positions is not None) == (requests == "positions")
    assert not [n for n in marked.gm.graph.nodes if op_name(n) in ("cumsum", "le", "scaled_dot_product_attention")]
    longer = torch.cat([torch.arange(9), torch.arange(3), torch.arange(7, 11)])[None]
    for given in (run_of_one, longer):
        ids = torch.randint(3, 97, given.shape)
        with torch.no_grad():
            expected = model(input_ids=ids, position_ids=given, **keywords)[0]
        got = run(marked, {"input_ids": ids, "position_ids": given})[0]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_padding_mask_given_to_a_model_is_refused_with_the_way_out() -> None:
    model = hf.LlamaModel(hf.LlamaConfig(**SHORT)).eval()
    ids = torch.randint(3, 97, (1, TOKENS))
    with torch.no_grad():
        gm, token = trace(model, backed=True, input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    marked = mark_attention(gm, token)
    assert not marked.sites
    assert len(marked.refusals) == 1
    assert "a padding mask was given (l_kwargs_attention_mask_): pack the batch with fgc.compile" in str(
        marked.refusals[0]
    )
    assert marked.refusals[0].module == "layers.0.self_attn"
    assert "sdpa_attention.py" in marked.refusals[0].source


def test_a_model_without_positions_is_one_request() -> None:
    model = hf.LlamaModel(hf.LlamaConfig(**SHORT)).eval()
    with torch.no_grad():
        gm, token = trace(model, backed=True, input_ids=torch.randint(3, 97, (1, TOKENS)), use_cache=False)
    marked = mark_attention(gm, token)
    assert (marked.requests, marked.positions, len(marked.sites)) == ("one", None, 1)
