"""Heads of every kind on a compiled body."""

from __future__ import annotations

import pytest
import torch

from fullgraph_compile import Reason
from tests.transformers_models.whole import call, close, fallbacks, padded, pair, replays, rows_equal


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Bert", "ForSequenceClassification"),
        ("Roberta", "ForSequenceClassification"),
        ("Llama", "ForSequenceClassification"),
        ("Qwen3", "ForSequenceClassification"),
        ("Bert", "ForTokenClassification"),
        ("Roberta", "ForMaskedLM"),
    ],
)
def test_heads_of_every_kind(name: str, kind: str) -> None:
    model, eager = pair(name, kind)
    for i, lengths in enumerate(([3, 7, 5], [6], [2, 2])):
        inputs = padded(lengths, seed=i)
        got, want = call(model, **inputs).logits, call(eager, **inputs).logits
        if kind == "ForSequenceClassification":
            close(got, want)
        else:
            rows_equal(got, want, inputs["attention_mask"])
    assert replays(model) == 3


def test_i_router_logits_and_the_loss_of_a_mixture() -> None:
    model, eager = pair("Mixtral", num_key_value_heads=2, num_local_experts=4)
    inputs = padded([3, 7])
    got = call(model, **inputs, output_router_logits=True, use_cache=False)
    want = call(eager, **inputs, output_router_logits=True, use_cache=False)
    rows_equal(got.logits, want.logits, inputs["attention_mask"])
    for a, b in zip(got.router_logits, want.router_logits, strict=True):
        rows_equal(a, b, inputs["attention_mask"].flatten())
    assert replays(model) + sum(fallbacks(model).values()) == 1


@pytest.mark.parametrize("name", ["Bloom", "Falcon", "DebertaV2", "Bart"])
def test_a_model_that_writes_its_attention_out_is_packed(name: str) -> None:
    own = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    kind = "Model" if name == "DebertaV2" else "ForCausalLM"
    model, eager = pair(name, kind, **(own if name == "Bart" else {}))
    for side in ("right", "left"):
        inputs = padded([3, 7], side)
        rows_equal(call(model, **inputs)[0], call(eager, **inputs)[0], inputs["attention_mask"])
    assert replays(model) + sum(fallbacks(model).values()) == (3 if name == "Bart" else 2)
    # Bart counts positions from the first column, padding or not.
    assert set(fallbacks(model)) == ({Reason.MASK} if name == "Bart" else set())


def test_what_cannot_be_packed_runs_eagerly_with_its_reason() -> None:
    model, eager = pair("Mamba")
    for side in ("right", "left"):
        inputs = padded([3, 7], side)
        assert torch.equal(call(model, **inputs)[0], call(eager, **inputs)[0])
    assert sum(fallbacks(model).values()) == 2
    assert set(fallbacks(model)) <= {Reason.NO_SITES, Reason.ATTENTION}
    assert not replays(model)


def test_an_encoder_and_decoder_in_one_runs_eagerly() -> None:
    own = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model, eager = pair("T5", "ForConditionalGeneration", **own)
    inputs = padded([3, 7])
    got, want = (call(m, **inputs, decoder_input_ids=inputs["input_ids"]).logits for m in (model, eager))
    assert torch.equal(got, want)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3), eager.generate(**inputs, max_new_tokens=3))
    assert fallbacks(model)
