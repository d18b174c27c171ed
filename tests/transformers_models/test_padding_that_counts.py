"""Heads to which padded positions mean something: such calls give what the model itself gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.transformers_models.whole import OPTIONS, PAD, call, close, fallbacks, padded, pair, replays, tiny


def with_embeddings(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    return {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_head_that_is_given_no_ids_reads_the_last_column(name: str) -> None:
    model, eager = pair(name, "ForSequenceClassification")
    for side, served in (("right", 0), ("left", 1)):
        inputs = with_embeddings(eager, padded([3, 9, 6], side))
        close(call(model, **inputs).logits, call(eager, **inputs).logits)
        assert replays(model) == served
    assert fallbacks(model) == {Reason.MASK: 1}
    assert "given no ids, so it pools the last column" in fgc.report(model).details[Reason.MASK]


def test_a_head_without_a_padding_id_reads_the_last_column() -> None:
    model, eager = pair("Llama", "ForSequenceClassification")
    model.config.pad_token_id = eager.config.pad_token_id = None
    for side, served in (("right", 0), ("left", 1)):
        inputs = padded([5], side, width=8)
        close(call(model, **inputs).logits, call(eager, **inputs).logits)
        assert replays(model) == served
    assert "has no pad_token_id" in fgc.report(model).details[Reason.MASK]


def test_a_head_that_tells_padding_by_another_id_than_the_batch_was_padded_with() -> None:
    model, eager = pair("Qwen3", "ForSequenceClassification")
    for side, served in (("right", 0), ("left", 1)):
        inputs = padded([3, 9, 6], side)
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, PAD + 1)
        close(call(model, **inputs).logits, call(eager, **inputs).logits)
        assert replays(model) == served
    assert f"not pad_token_id ({PAD})" in fgc.report(model).details[Reason.MASK]
    # Real tokens that are the padding id are passed over by the head, and are no fault of the batch.
    inputs = padded([3, 9, 6])
    inputs["input_ids"][0, 2] = PAD
    close(call(model, **inputs).logits, call(eager, **inputs).logits)
    assert replays(model) == 2


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Llama"])
def test_answers_and_losses_of_question_answering_look_at_padding_too(name: str) -> None:
    model, eager = pair(name, "ForQuestionAnswering")
    inputs = padded([3, 9, 6])
    marks = {f"{end}_positions": torch.tensor([1, 2, 3]) for end in ("start", "end")}
    got, want = (call(m, **inputs, **marks) for m in (model, eager))
    close(got.loss, want.loss)
    for end in ("start_logits", "end_logits"):
        assert torch.equal(got[end].argmax(-1), want[end].argmax(-1))
    assert fallbacks(model) == {Reason.MASK: 1}
    assert "compares all columns" in fgc.report(model).details[Reason.MASK]
    full = {"input_ids": inputs["input_ids"][1:2]}
    close(call(model, **full).start_logits, call(eager, **full).start_logits)
    assert replays(model) == 1


def test_a_decoder_that_says_nowhere_that_it_is_causal_may_be_padded_on_the_left() -> None:
    model, eager = pair("Bloom", "ForSequenceClassification", n_layer=2, n_head=4)
    for side in ("left", "right"):
        inputs = padded([3, 9, 6], side)
        close(call(model, **inputs).logits, call(eager, **inputs).logits)
    assert not fallbacks(model)
    assert replays(model) == 2


@pytest.mark.parametrize(("name", "side"), [("Roberta", "left"), ("Llama", "right")])
def test_a_head_that_is_wrapped_once_more_is_still_that_head(name: str, side: str) -> None:
    peft = pytest.importorskip("peft")
    # No kind of task is given, so the wrapper's class does not name the head's.
    adapter = peft.LoraConfig(target_modules=["q_proj", "query"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(tiny(name, "ForSequenceClassification"), adapter).eval()
    assert type(model).__name__ == "PeftModel"
    eager = copy.deepcopy(model)
    fgc.compile(model, **OPTIONS)
    inputs = padded([3, 9, 6], side)
    if name == "Llama":
        inputs = with_embeddings(eager, inputs)
    close(call(model, **inputs).logits, call(eager, **inputs).logits)
    assert fallbacks(model) == {Reason.MASK: 1}
