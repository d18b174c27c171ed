"""Rows of the fault list about outputs, embeddings, positions and weights, on whole models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from tests.transformers_models.whole import OPTIONS, call, close, padded, pair, replays, rows_equal, tiny


def test_b86_hooks_added_and_removed_after_the_first_call_take_effect() -> None:
    model, eager = pair("Llama")
    inputs = padded([3, 7])

    def add_one(module: Any, args: Any, out: Tensor) -> Tensor:
        return out + 1

    plain = call(model, **inputs, use_cache=False).logits
    hooks = [m.model.layers[0].register_forward_hook(add_one) for m in (model, eager)]
    want = call(eager, **inputs, use_cache=False).logits
    rows_equal(call(model, **inputs, use_cache=False).logits, want, inputs["attention_mask"])
    assert float((want - plain).abs().max()) > 1e-2
    for hook in hooks:
        hook.remove()
    rows_equal(call(model, **inputs, use_cache=False).logits, plain, inputs["attention_mask"])


def test_b90_embeddings_are_not_the_tokens() -> None:
    model, eager = pair("Llama")
    inputs = padded([3, 7])
    mask = inputs["attention_mask"]
    plain = call(model, **inputs, use_cache=False).logits
    for seed in (1, 2):
        x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(seed))
        got = call(model, inputs_embeds=x, attention_mask=mask, use_cache=False).logits
        rows_equal(got, call(eager, inputs_embeds=x, attention_mask=mask, use_cache=False).logits, mask)
        assert float((got - plain)[mask.bool()].abs().max()) > 1e-2
    assert replays(model) == 3


def test_b92_three_axes_of_positions() -> None:
    from transformers import Qwen2VLTextConfig, Qwen2VLTextModel

    config = Qwen2VLTextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=1, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2VLTextModel(config).eval()
    eager = copy.deepcopy(model)
    fgc.compile(model, **OPTIONS)
    for columns in (5, 3, 1):
        for rows in (1, 2):
            inputs = padded([columns] + [max(columns - 1, 1)] * (rows - 1))
            positions = torch.randint(0, 20, (3, rows, columns), generator=torch.Generator().manual_seed(columns))
            got = call(model, **inputs, position_ids=positions, use_cache=False)[0]
            want = call(eager, **inputs, position_ids=positions, use_cache=False)[0]
            rows_equal(got, want, inputs["attention_mask"])
            got = call(model, **inputs, use_cache=False)[0]
            rows_equal(got, call(eager, **inputs, use_cache=False)[0], inputs["attention_mask"])
    report = fgc.report(model)
    assert sum(report.replays.values()) == 12
    assert not report.fallbacks


def test_b93_a_whole_model_is_what_it_was(tmp_path: Any) -> None:
    model = tiny("Llama")
    eager = copy.deepcopy(model)
    keys, kind, config, device = list(model.state_dict()), type(model), model.config, model.device
    assert fgc.compile(model, **OPTIONS) is model
    inputs = padded([3, 7])
    call(model, **inputs)
    assert isinstance(model, kind)
    assert (model.config, model.device, list(model.state_dict())) == (config, device, keys)
    assert model.config._attn_implementation == "sdpa"
    assert model.can_generate()
    model.something = 3
    assert model.something == 3
    del model.something
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path).eval()
    for name, value in eager.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert "forward" not in loaded.model.__dict__
    close(call(loaded, **inputs).logits, call(eager, **inputs).logits)
    fgc.close(model)
    assert "forward" not in model.model.__dict__
    close(call(model, **inputs).logits, call(eager, **inputs).logits)


def test_b97_tied_embedding_and_head_follow_one_update() -> None:
    model, eager = pair("Llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    inputs = padded([3, 7])
    for _ in range(2):
        rows_equal(call(model, **inputs).logits, call(eager, **inputs).logits, inputs["attention_mask"])
        with torch.no_grad():
            for m in (model, eager):
                m.lm_head.weight.mul_(-0.5)
    assert len({p.data_ptr() for p in model.parameters()}) == len({p.data_ptr() for p in eager.parameters()})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert replays(model) == 2


def test_a_model_that_passes_by_its_body_is_refused_by_name() -> None:
    """ProphetNet's head calls the decoder inside of the wrapper that is its base model."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_decoder_layers": 1,
        "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
    }
    config = transformers.ProphetNetConfig(is_decoder=True, add_cross_attention=False, **sizes)
    model = fgc.compile(transformers.ProphetNetForCausalLM(config).eval(), **OPTIONS)
    batch = fgc.PrefillBatch([5, 4], device="cpu")
    with torch.inference_mode(), batch, pytest.raises(fgc.FallbackError, match="requests, 9 tokens"):
        model(input_ids=torch.arange(1, 10)[None], use_cache=False)
    assert fgc.report(model).fallbacks == {fgc.Reason.NO_SITES: 1}


def test_a_model_of_several_parts_is_traced_where_its_ids_come_in() -> None:
    """Its text decoder gets embeddings and masks that the whole has made."""
    from fullgraph_compile.integrations import body_of
    from tests.transformers_models import architectures as arch

    model = arch.build(arch.Result("causal", "gemma4_unified"))
    assert body_of(model) is model.model
    opt = arch.build(arch.Result("causal", "opt"))
    assert body_of(opt) is opt.model.decoder


def test_a_chunk_longer_than_any_small_call_is_no_causal_mask() -> None:
    """Llama 4 attends within chunks, which nothing but its masks says: its long calls run as they are."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    from tests.transformers_models.tiny_configs import Variant, tiny_config

    config = tiny_config(Llama4TextConfig, Variant(), causal=True)
    config.attention_chunk_size = 16
    torch.manual_seed(0)
    model = Llama4ForCausalLM(config).eval()
    eager = copy.deepcopy(model)
    fgc.compile(model, **OPTIONS)
    for tokens in (7, 40):
        ids = torch.randint(2, 97, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        close(call(model, ids, use_cache=False).logits, call(eager, ids, use_cache=False).logits)


def test_masks_are_compared_at_distances_of_no_small_call() -> None:
    from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function
    from transformers.masking_utils import sliding_window_causal_mask_function as window

    from fullgraph_compile.integrations.hf_masks import _difference

    cpu = torch.device("cpu")
    assert _difference(causal_mask_function, -1, 0, cpu) == ""
    assert _difference(window(4096), 4095, 0, cpu) == ""
    chunks = chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int))
    assert _difference(chunks, -1, 0, cpu) == "query 8192 does not see key 0"
    assert _difference(window(4096), 4096, 0, cpu)
    assert _difference(causal_mask_function, -1, -1, cpu)
