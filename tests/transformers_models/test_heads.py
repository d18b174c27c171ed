"""Heads of every kind on a compiled body."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.transformers_models.whole import OPTIONS, call, close, fallbacks, padded, pair, replays, rows_equal, tiny


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


def packed_call(model: torch.nn.Module, lengths: list[int]) -> tuple[Any, list[torch.Tensor]]:
    """Requests in one packed call, and the ids of each."""
    ids = list(torch.arange(2, 2 + sum(lengths)).split(lengths))
    with torch.no_grad(), fgc.PrefillBatch(lengths, device="cpu"):
        return model(input_ids=torch.cat(ids)[None]), ids


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_a_packed_batch_is_pooled_request_by_request(kind: str) -> None:
    model, eager = pair("Bert", kind)
    got, ids = packed_call(model, [3, 1, 5])
    want = torch.cat([call(eager, input_ids=x[None])[1 if kind == "Model" else 0] for x in ids])
    close(got[1] if kind == "Model" else got.logits, want)
    assert replays(model) == 1


@pytest.mark.parametrize("name", ["Roberta", "Llama"])
def test_a_head_that_picks_a_row_of_a_packed_batch_is_refused(name: str) -> None:
    model, eager = pair(name, "ForSequenceClassification")
    with pytest.raises(fgc.FallbackError, match="give a padded batch"):
        packed_call(model, [3, 5])
    got, ids = packed_call(model, [5])
    close(got.logits, call(eager, input_ids=ids[0][None]).logits)


def test_a_head_of_the_users_own_is_refused_for_a_packed_batch() -> None:
    from transformers import BertPreTrainedModel

    class Centred(BertPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bert = tiny("Bert", "Model")

        def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
            rows = self.bert(input_ids, attention_mask=attention_mask)[0]
            return rows - rows.mean(1, keepdim=True)

    model = Centred(tiny("Bert", "Model").config).eval()
    eager = copy.deepcopy(model)
    fgc.compile(model, **OPTIONS)
    with pytest.raises(fgc.FallbackError, match="Centred may put rows of several requests"):
        packed_call(model, [3, 5])
    got, ids = packed_call(model, [5])
    close(got, call(eager, ids[0][None]))
    assert replays(model) == 1


@pytest.mark.parametrize(("name", "kind"), [("BertGeneration", "Decoder"), ("Bert", "ForMaskedLM")])
def test_a_head_over_a_vocabulary_takes_a_packed_batch(name: str, kind: str) -> None:
    model, eager = pair(name, kind)
    got, ids = packed_call(model, [3, 1, 5])
    close(got.logits, torch.cat([call(eager, input_ids=x[None]).logits for x in ids], dim=1))
    assert replays(model) == 1


def test_a_padded_batch_whose_results_cannot_be_put_together_runs_as_the_model_itself() -> None:
    # Its own forward picks one row of each request: no rows of tokens, and none of one packed row.
    model, eager = pair("CLIPText", "Model", bos_token_id=0, eos_token_id=2)
    for seed, lengths in enumerate(([3, 7, 5], [4, 4], [6, 2])):
        inputs = padded(lengths, seed=seed)
        got, want = call(model, **inputs), call(eager, **inputs)
        close(got.pooler_output, want.pooler_output)
        rows_equal(got.last_hidden_state, want.last_hidden_state, inputs["attention_mask"])
        with torch.inference_mode():
            assert fgc.decision(model, **inputs).reason is Reason.SINGLE_REQUEST
    assert fallbacks(model) == {Reason.SINGLE_REQUEST: 3}
    # What was launched in vain was so once, and is no replay.
    assert replays(model) == 0
    assert sum(fgc.report(model).dropped.values()) == 1
    alone = padded([5])
    close(call(model, **alone).pooler_output, call(eager, **alone).pooler_output)
    assert replays(model) == 1
    with fgc.PrefillBatch([3, 4], device="cpu"), pytest.raises(fgc.FallbackError, match="requests apart"):
        call(model, input_ids=torch.arange(3, 10)[None])
