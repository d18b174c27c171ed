"""What a compiled model returns: every output that eager gives, in eager's form, or eager itself with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullgraph_compile import Reason
from tests.transformers_models.whole import call, close, fallbacks, padded, pair, replays, rows_equal


@pytest.mark.parametrize(("name", "kind"), [("Llama", "ForCausalLM"), ("Qwen3", "Model"), ("Bert", "ForMaskedLM")])
def test_b88_hidden_states_of_every_layer(name: str, kind: str) -> None:
    model, eager = pair(name, kind)
    inputs = padded([3, 7, 5])
    call(model, **inputs)  # a first call without them
    for i in (1, 2, 3):
        inputs = padded([3, 7, 5], seed=i)
        got = call(model, **inputs, output_hidden_states=True)
        want = call(eager, **inputs, output_hidden_states=True)
        assert list(got) == list(want)
        assert len(got.hidden_states) == len(want.hidden_states) == 3
        for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
            rows_equal(a, b, inputs["attention_mask"])
    assert replays(model) == 4
    assert not fallbacks(model)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_b87_logits_to_keep_of_a_padded_batch(name: str) -> None:
    model, eager = pair(name)
    for count, keep in enumerate((0, 1, 3, torch.tensor([0, 2])), 1):
        for lengths in ([3, 7], [4, 4], [6]):
            inputs = padded(lengths, "left")
            got = call(model, **inputs, logits_to_keep=keep).logits
            want = call(eager, **inputs, logits_to_keep=keep).logits
            columns = slice(-keep, None) if isinstance(keep, int) else keep
            rows_equal(got, want, inputs["attention_mask"][:, columns])
        assert replays(model) == 3 * count


@pytest.mark.parametrize(("name", "kind"), [("Llama", "ForCausalLM"), ("Llama", "Model"), ("Bert", "Model")])
def test_tuples_in_place_of_outputs(name: str, kind: str) -> None:
    model, eager = pair(name, kind)
    more: dict[str, Any] = {"use_cache": False} if name == "Llama" else {}
    for by_config in (False, True):
        if by_config:
            model.config.return_dict = eager.config.return_dict = False
        else:
            more["return_dict"] = False
        for lengths in ([6], [3, 5]):
            inputs = padded(lengths)
            got, want = call(model, **inputs, **more), call(eager, **inputs, **more)
            assert type(got) is type(want) is tuple
            assert len(got) == len(want)
            rows_equal(got[0], want[0], inputs["attention_mask"])
        more.pop("return_dict", None)
        if kind == "ForCausalLM":
            break  # transformers' own heads do not work with such a config
    assert replays(model) >= 2


def test_i_labels_give_eagers_loss() -> None:
    model, eager = pair("Llama")
    inputs = padded([3, 7])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    got, want = call(model, **inputs, labels=labels), call(eager, **inputs, labels=labels)
    close(got.loss, want.loss)
    assert replays(model) == 1


def test_attention_weights_are_eagers() -> None:
    model, eager = pair("Gemma2", "Model")
    inputs = padded([3, 5])
    got = call(model, **inputs, output_attentions=True, use_cache=False)
    want = call(eager, **inputs, output_attentions=True, use_cache=False)
    for a, b in zip(got.attentions, want.attentions, strict=True):
        close(a, b)
    assert fallbacks(model) == {Reason.ARGUMENTS: 1}


def test_attentions_that_the_config_asks_for_are_those_of_the_model() -> None:
    model, eager = pair("Llama", "Model", num_hidden_layers=1, attn_implementation="eager")
    for asked in (False, True, False, True):
        for m in (model, eager):
            m.config.output_attentions = asked
        for seed in (1, 2):
            inputs = padded([4, 4], seed=seed)
            got, want = call(model, **inputs), call(eager, **inputs)
            assert list(got) == list(want) and ("attentions" in got) == asked
            close(got[0], want[0])
            if asked:
                close(got.attentions[0], want.attentions[0])
    assert fallbacks(model)[Reason.ARGUMENTS] == 4
