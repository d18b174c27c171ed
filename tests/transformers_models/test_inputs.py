"""Padded batches of encoders, and inputs other than ids and mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from fullgraph_compile.tracing import Tracer
from fullgraph_compile.watching import WORKS
from tests.transformers_models.whole import call, fallbacks, padded, pair, replays, rows_equal

BATCHES = [[5], [3, 7], [4, 4, 4], [7, 1, 3, 5, 2]]


@pytest.mark.parametrize("name", ["Bert", "Roberta", "DistilBert", "Electra", "Albert"])
def test_padded_batches_of_encoders(name: str) -> None:
    own = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4} if name == "DistilBert" else {}
    model, eager = pair(name, "Model", **own)
    for i, lengths in enumerate(BATCHES):
        inputs = padded(lengths, seed=i)
        got, want = call(model, **inputs), call(eager, **inputs)
        assert type(got) is type(want)
        assert list(got) == list(want)
        rows_equal(got.last_hidden_state, want.last_hidden_state, inputs["attention_mask"])
        if "pooler_output" in want:
            torch.testing.assert_close(got.pooler_output, want.pooler_output, rtol=1e-5, atol=1e-5)
    assert replays(model) == len(BATCHES)
    assert not fallbacks(model)


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_left_padding_of_an_encoder_that_pools_runs_eagerly(name: str) -> None:
    model, eager = pair(name, "Model")
    inputs = padded([3, 6], "left")
    got, want = call(model, **inputs), call(eager, **inputs)
    for key in want:
        assert torch.equal(got[key], want[key])
    assert fallbacks(model) == {Reason.MASK: 1}


def test_left_padding_of_an_encoder_without_a_pooler_is_packed() -> None:
    model, eager = pair("Roberta", "ForMaskedLM")
    for lengths in ([3, 6], [5, 2, 4]):
        inputs = padded(lengths, "left")
        rows_equal(call(model, **inputs).logits, call(eager, **inputs).logits, inputs["attention_mask"])
    assert replays(model) == 2


def test_other_token_inputs_are_packed_alike() -> None:
    model, eager = pair("Bert", "Model")
    for seed in (1, 2):
        inputs = padded([3, 7, 5], seed=seed)
        types = torch.randint(0, 2, (3, 7), generator=torch.Generator().manual_seed(seed))
        got = call(model, **inputs, token_type_ids=types)
        want = call(eager, **inputs, token_type_ids=types)
        rows_equal(got[0], want[0], inputs["attention_mask"])
        assert float((want[0] - call(eager, **inputs)[0]).abs().max()) > 1e-2
    assert replays(model) == 2


@pytest.mark.parametrize("side", ["right", "left"])
def test_j_inputs_embeds_of_a_padded_batch(side: str) -> None:
    model, eager = pair("Roberta" if side == "right" else "Llama", "Model")
    more: dict[str, Any] = {} if side == "right" else {"use_cache": False}
    mask = padded([3, 7], side)["attention_mask"]
    x = torch.randn(2, 7, 32)
    got = call(model, inputs_embeds=x, attention_mask=mask, **more)[0]
    rows_equal(got, call(eager, inputs_embeds=x, attention_mask=mask, **more)[0], mask)
    assert replays(model) == 1


def test_positions_of_a_padded_batch() -> None:
    model, eager = pair("GPT2", "Model")
    inputs = padded([3, 7, 5], "left")
    of_all = torch.arange(7)[None] + 2
    of_each = of_all + torch.tensor([[0], [3], [5]])
    from_the_mask = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    for count, positions in enumerate((of_all, of_all[0], of_each, from_the_mask), 1):
        got = call(model, **inputs, position_ids=positions, use_cache=False)[0]
        want = call(eager, **inputs, position_ids=positions, use_cache=False)[0]
        rows_equal(got, want, inputs["attention_mask"])
        assert replays(model) == count


def test_positions_that_restart_without_a_mask_are_requests_as_in_eager() -> None:
    model, eager = pair("Llama", "Model")
    ids = padded([6, 6])["input_ids"]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    for given in (positions, positions[:1]):
        want = call(eager, input_ids=ids, position_ids=given, use_cache=False)[0]
        rows_equal(call(model, input_ids=ids, position_ids=given, use_cache=False)[0], want, torch.ones(2, 6))
    # With a mask, transformers looks for no requests in positions.
    mask = torch.ones(2, 6)
    want = call(eager, input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)[0]
    got = call(model, input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)[0]
    rows_equal(got, want, mask)
    assert replays(model) == 3


def test_positions_of_another_shape_are_an_error() -> None:
    model, _ = pair("Llama", "Model")
    for shape in ((2, 6), (3, 7), (6,)):
        with pytest.raises(ValueError, match="position_ids has shape"):
            call(model, **padded([3, 7]), position_ids=torch.zeros(shape, dtype=torch.long), use_cache=False)


def test_an_encoder_whose_pooler_is_left_out_of_its_trace_is_asked_only_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = pair("Bert", "Model")
    inputs = padded([6])
    first = call(model, **inputs)
    asked: list[None] = []
    holds = Tracer.holds
    monkeypatch.setattr(Tracer, "holds", lambda self, variant: asked.append(None) or holds(self, variant))
    for _ in range(3):
        assert torch.equal(call(model, **inputs).pooler_output, first.pooler_output)
    assert not asked or not WORKS
    model.pooler = type(model.pooler)(model.config)
    got = call(model, **inputs)
    with torch.no_grad():
        torch.testing.assert_close(got.pooler_output, model.pooler(got.last_hidden_state))
    assert not torch.equal(got.pooler_output, first.pooler_output)


@pytest.mark.parametrize("use_cache", [True, False, None])
def test_positions_that_begin_anew_in_each_row_mean_what_they_mean_to_the_model(use_cache: bool | None) -> None:
    """To a model that fills a cache, nothing."""
    model, eager = pair("Llama", num_hidden_layers=1)
    ids, positions = torch.randint(2, 97, (2, 6)), torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
    given: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": use_cache}
    for _ in range(2):
        torch.testing.assert_close(call(model, **given).logits, call(eager, **given).logits, rtol=1e-5, atol=1e-5)
    assert replays(model) == (0 if use_cache is not False else 2)


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_positions_that_begin_anew_do_not_part_what_a_two_sided_model_sees(name: str) -> None:
    model, eager = pair(name, "Model", num_hidden_layers=1)
    positions = torch.tensor([[2, 3, 4, 2, 3, 4, 5]])
    for seed in (1, 2):
        given = {"input_ids": padded([7], seed=seed)["input_ids"], "position_ids": positions}
        torch.testing.assert_close(call(model, **given)[0], call(eager, **given)[0], rtol=1e-5, atol=1e-5)
    assert replays(model) == 2


def test_the_padding_id_by_which_positions_are_counted_is_the_models_own_at_each_call() -> None:
    model, eager = pair("Roberta", "Model", num_hidden_layers=1)
    ids = torch.tensor([[7, 5, 1, 9, 5, 0], [8, 1, 1, 5, 6, 3]])
    seen = []
    for place, pad in (("embeddings", 1), ("embeddings", 5), ("config", 0), ("embeddings", 1), ("embeddings", 5)):
        for m in (model, eager):
            setattr(m.config, "pad_token_id", pad) if place == "config" else setattr(m.embeddings, "padding_idx", pad)
        for _ in range(2):
            got, want = call(model, input_ids=ids)[0], call(eager, input_ids=ids)[0]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        seen.append(want)
    assert float((seen[1] - seen[0]).abs().max()) > 1e-2
    assert replays(model) == 10
    assert fgc.report(model).compiles == 1


def test_none_in_the_place_of_what_the_config_says_is_not_the_config() -> None:
    model, eager = pair("Llama", "Model", num_hidden_layers=1)
    inputs: dict[str, Any] = {**padded([3, 5]), "use_cache": False}
    for m in (model, eager):
        m.config.output_hidden_states = True
    for more in ({}, {"output_hidden_states": None}, {"output_hidden_states": True}) * 2:
        got, want = call(model, **inputs, **more), call(eager, **inputs, **more)
        assert list(got) == list(want)
    assert not fallbacks(model)


def test_a_call_of_no_rows_and_one_without_tokens_to_pool_fail_as_the_model_does() -> None:
    model, eager = pair("Bert", "Model", num_hidden_layers=1)
    call(model, **padded([3, 5]))
    for shape in ((0, 5), (2, 0), (0, 0)):
        ids = torch.ones(shape, dtype=torch.long)
        for more in ({}, {"attention_mask": ids}):
            errors = []
            for m in (model, eager):
                with pytest.raises(RuntimeError) as raised:
                    call(m, input_ids=ids, **more)
                errors.append(str(raised.value))
            assert errors[0] == errors[1]
    assert fallbacks(model) == {Reason.EMPTY: 6}
