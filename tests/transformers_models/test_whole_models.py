"""Whole models over many calls: what changes between them is noticed, and nothing is compiled without need."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.transformers_models.whole import OPTIONS, call, close, fallbacks, padded, pair, replays, rows_equal, tiny


def check(model: nn.Module, eager: nn.Module, seed: int = 1, **more: Any) -> None:
    inputs = padded([3, 7, 4], seed=seed)
    rows_equal(call(model, **inputs, **more).logits, call(eager, **inputs, **more).logits, inputs["attention_mask"])


def test_train_and_eval_are_followed() -> None:
    model, eager = pair("Bert", "ForSequenceClassification")
    inputs = padded([3, 7, 4])
    close(call(model, **inputs).logits, call(eager, **inputs).logits)
    for m in (model, eager):
        m.train()
    outs = []
    for m in (model, eager):
        torch.manual_seed(3)
        outs.append(call(m, **inputs).logits)
    close(*outs)  # with dropout
    assert fallbacks(model) == {Reason.TRAINING: 1}
    for m in (model, eager):
        m.eval()
    close(call(model, **inputs).logits, call(eager, **inputs).logits)
    assert replays(model) == 2


def test_training_a_compiled_model_gives_eagers_gradients() -> None:
    model, eager = pair("Llama")
    inputs = padded([3, 7])
    check(model, eager)
    for m in (model, eager):
        m(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, p), q in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        assert p.grad is not None, name
        close(p.grad, q[1].grad, 1e-4)
    assert fallbacks(model)[Reason.GRAD] == 1
    check(model, eager)
    assert replays(model) == 2


def test_autocast_is_followed_both_ways() -> None:
    model, eager = pair("Llama")
    inputs = padded([3, 7])
    real = inputs["attention_mask"].bool()
    plain = call(eager, **inputs, use_cache=False).logits[real]
    for _ in range(2):
        close(call(model, **inputs, use_cache=False).logits[real], plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = call(model, **inputs, use_cache=False).logits[real]
            want = call(eager, **inputs, use_cache=False).logits[real]
        close(got, want, 3e-2)
        assert float((want.float() - plain).abs().max()) > 1e-3
    assert replays(model) == 4


def test_models_of_other_classes_that_are_made_later_change_nothing() -> None:
    """transformers keeps a registry of the classes that models were made of, which a trace reads."""
    model, eager = pair("Llama")
    check(model, eager)
    compiles = fgc.report(model).compiles
    for name in ("first", "second"):
        type(f"{name.title()}Llama", (type(eager),), {})(eager.config)
        check(model, eager)
    assert fgc.report(model).compiles == compiles and not fallbacks(model)


def test_attributes_and_weights_that_change_are_noticed() -> None:
    model, eager = pair("Llama")
    check(model, eager)
    for m in (model, eager):
        m.model.norm.variance_epsilon = 0.5
    check(model, eager)
    for m in (model, eager):
        m.model.layers[0].mlp.act_fn = nn.ReLU()
    check(model, eager)
    for m in (model, eager):
        torch.manual_seed(1)
        m.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.randn(64, 32))
    check(model, eager)
    for m in (model, eager):
        m.model.layers[1].self_attn.scaling = 0.1
    check(model, eager)
    for m in (model, eager):
        m.model.layers = m.model.layers[:1]
        m.config.num_hidden_layers = 1
    check(model, eager, use_cache=False)


def test_the_attention_that_the_user_sets_later_is_used_by_eager_calls_only() -> None:
    model, eager = pair("Llama")
    check(model, eager)
    for m in (model, eager):
        m.set_attn_implementation("eager")
    check(model, eager)
    assert model.config._attn_implementation == "eager"
    check(model, eager, output_attentions=True)
    assert replays(model) >= 2


def test_warmup_explain_release_and_close_of_a_whole_model() -> None:
    for name, kind in (("Llama", "ForCausalLM"), ("Bert", "ForSequenceClassification"), ("Roberta", "Model")):
        model, eager = pair(name, kind)
        more: dict[str, Any] = {"use_cache": False} if name == "Llama" else {}
        inputs = padded([3, 7])
        assert fgc.warmup(model).ready
        assert fgc.report(model).compiles == 1
        with torch.no_grad():
            assert "graph, bucket 16" in fgc.explain(model, **inputs, **more)
            assert "eager" in fgc.explain(model, **inputs, output_attentions=True, **more)
            if name == "Llama":
                assert "graph, bucket 16" in fgc.explain(model, **inputs, **more, logits_to_keep=1, return_dict=False)
        assert not replays(model)
        got, want = call(model, **inputs, **more)[0], call(eager, **inputs, **more)[0]
        if kind == "ForSequenceClassification":
            close(got, want)
        else:
            rows_equal(got, want, inputs["attention_mask"])
        assert fgc.report(model).compiles == 1
        assert replays(model) == 1
        fgc.release(model)
        call(model, **inputs, **more)
        assert replays(model) == 2
        fgc.close(model)
        assert torch.equal(call(model, **inputs, **more)[0], call(eager, **inputs, **more)[0])


def test_too_many_tokens_or_rows_run_compiled() -> None:
    model = tiny("Llama")
    eager = copy.deepcopy(model)
    fgc.compile(model, **{**OPTIONS, "buckets": [8, 16], "request_slots": 4})
    for lengths, reason in (([9, 9], Reason.OVER_LADDER), ([2] * 5, Reason.OVER_SLOTS)):
        inputs = padded(lengths)
        rows_equal(call(model, **inputs).logits, call(eager, **inputs).logits, inputs["attention_mask"])
        assert fallbacks(model)[reason] == 1


def test_strict_raises_where_a_padded_call_replays_nothing() -> None:
    model = tiny("Llama")
    fgc.compile(model, **OPTIONS, strict=True)
    call(model, **padded([3, 7]))
    assert replays(model) == 1
    holes = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(fgc.FallbackError, match="holes"):
        call(model, input_ids=holes + 3, attention_mask=holes)


class Shifting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-2, keepdim=True)  # over the tokens


def test_a_body_that_mixes_rows_is_right_for_a_padded_batch() -> None:
    """Packed it would mix requests: every one is on its own, or the call is eager."""
    model = tiny("Llama")
    model.model.layers[0].mlp = Shifting()
    eager = copy.deepcopy(model)
    fgc.compile(model, **OPTIONS)
    for lengths in ([4, 4], [5], [3, 3, 3]):
        inputs = padded(lengths)
        rows_equal(call(model, **inputs).logits, call(eager, **inputs).logits, inputs["attention_mask"])
    assert not replays(model)
