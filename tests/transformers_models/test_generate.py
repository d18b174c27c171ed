"""``generate`` of a compiled model, and the cache that a prefill leaves for decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.transformers_models.whole import call, close, fallbacks, padded, pair, replays, rows_equal

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2", "GPT2", "OPT"])
def test_generate_equals_eager_and_its_prefill_is_replayed(name: str) -> None:
    model, eager = pair(name)
    for i, lengths in enumerate(([6], [3, 7], [2, 5, 5])):
        inputs = padded(lengths, "left", seed=i)
        assert torch.equal(model.generate(**inputs, **GREEDY), eager.generate(**inputs, **GREEDY))
    assert replays(model) == 3
    assert fallbacks(model) == {Reason.ARGUMENTS: 3 * (GREEDY["max_new_tokens"] - 1)}


def decode(model: Any, out: Any, mask: Tensor, steps: int = 3) -> list[Tensor]:
    """Logits of greedy steps after a prefill, by transformers' own decoding."""
    logits, cache = out.logits[:, -1:], out.past_key_values
    positions = mask.sum(-1, keepdim=True)
    steps_logits = []
    for _ in range(steps):
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], dim=1)
        out = call(model, input_ids=logits.argmax(-1), attention_mask=mask, past_key_values=cache,
                   position_ids=positions, use_cache=True)  # fmt: skip
        logits, cache, positions = out.logits, out.past_key_values, positions + 1
        steps_logits.append(logits)
    return steps_logits


@pytest.mark.parametrize("given", ["none", "without config", "with config"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_the_cache_of_a_prefill_is_the_one_that_eager_leaves(name: str, given: str) -> None:
    model, eager = pair(name)
    for lengths in ([6], [3, 7, 5]):
        inputs = padded(lengths, "left")
        outs = []
        for m in (model, eager):
            cache = {"none": None, "without config": DynamicCache(), "with config": DynamicCache(config=m.config)}[
                given
            ]
            outs.append(call(m, **inputs, past_key_values=cache, use_cache=True))
            assert cache is None or outs[-1].past_key_values is cache
        got, want = outs
        assert type(got.past_key_values) is type(want.past_key_values)
        assert got.past_key_values.get_seq_length() == want.past_key_values.get_seq_length()
        for mine, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            assert type(mine) is type(theirs)
            kept = inputs["attention_mask"][:, -mine.keys.shape[2] :]
            rows_equal(mine.keys.transpose(1, 2), theirs.keys.transpose(1, 2), kept)
            rows_equal(mine.values.transpose(1, 2), theirs.values.transpose(1, 2), kept)
        for a, b in zip(decode(model, got, inputs["attention_mask"]), decode(eager, want, inputs["attention_mask"]),
                        strict=True):  # fmt: skip
            close(a, b)
    assert replays(model) == 2
    assert fgc.report(model).compiles == 1


def test_a_cache_that_is_filled_or_of_another_kind_runs_eagerly() -> None:
    model, eager = pair("Llama")
    inputs = padded([6])
    static = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    got = call(model, **inputs, past_key_values=static[0], use_cache=True)
    close(got.logits, call(eager, **inputs, past_key_values=static[1], use_cache=True).logits)
    assert "StaticCache" in fgc.report(model).details[Reason.ARGUMENTS]
    filled = [call(eager, **inputs, use_cache=True).past_key_values for _ in range(2)]
    more = {"input_ids": padded([3], seed=5)["input_ids"], "attention_mask": torch.ones(1, 9)}
    close(call(model, **more, past_key_values=filled[0]).logits, call(eager, **more, past_key_values=filled[1]).logits)
    assert not replays(model)


def test_a_packed_batch_of_several_requests_leaves_no_cache_and_says_so() -> None:
    model, _ = pair("Llama")
    ids = padded([8])["input_ids"]
    with fgc.PrefillBatch([3, 5], device="cpu"), pytest.raises(fgc.FallbackError, match="use_cache"):
        call(model, input_ids=ids)


def test_sampling_and_beams_are_transformers_own() -> None:
    model, eager = pair("Llama")
    inputs = padded([3, 6], "left")
    for settings in ({"num_beams": 2}, {"do_sample": True, "top_k": 5}):
        outs = []
        for m in (model, eager):
            torch.manual_seed(7)
            outs.append(m.generate(**inputs, max_new_tokens=4, eos_token_id=None, **settings))
        assert torch.equal(*outs)
    assert replays(model) == 2


def test_generate_under_every_grad_mode() -> None:
    model, eager = pair("Llama")
    inputs = padded([4])
    want = eager.generate(**inputs, **GREEDY)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert replays(model) == 3
