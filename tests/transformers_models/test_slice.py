"""Twenty of the architectures that ``make models`` measures: what replays keeps doing so, and everything is right."""

from __future__ import annotations

import json

import pytest

from tests.transformers_models import architectures as arch

REPLAYING = [
    ("causal", "llama"),
    ("causal", "mistral"),
    ("causal", "qwen3"),
    ("causal", "gemma2"),
    ("causal", "gpt2"),
    ("causal", "gpt_neox"),
    ("causal", "opt"),
    ("causal", "phi3"),
    ("causal", "mixtral"),
    ("causal", "deepseek_v3"),
    ("causal", "gpt_oss"),
    # One request a call, as it counts its positions itself.
    ("causal", "bart"),
    # Attention of their own, with ALiBi and without.
    ("causal", "bloom"),
    ("causal", "falcon"),
    ("masked", "bert"),
    ("masked", "roberta"),
    ("base", "distilbert"),
    ("base", "modernbert"),
]
REFUSED = {
    ("causal", "mamba"): "no attention call",
    ("causal", "llama4_text"): "an attention call was not understood",
    ("causal", "minimax"): "recurrent layers (MiniMaxLightningAttention)",
    ("causal", "big_bird"): "padding is not proven safe",
}


@pytest.mark.parametrize(("mapping", "name"), REPLAYING)
def test_it_replays_every_eligible_call_and_equals_eager(mapping: str, name: str) -> None:
    result = arch.measure(mapping, name)
    assert result.status == arch.REPLAYS, result
    assert result.calls == len(arch.CALLS), result
    assert result.error <= arch.TOLERANCE


@pytest.mark.parametrize(("mapping", "name"), REFUSED)
def test_it_is_refused_with_the_reason_and_equals_eager(mapping: str, name: str) -> None:
    result = arch.measure(mapping, name)
    assert result.status == arch.REFUSED, result
    assert not result.replays
    assert REFUSED[mapping, name] in result.reason
    assert result.error <= arch.TOLERANCE


def test_a_wrong_result_is_not_equal_whatever_else_happened() -> None:
    result = arch.Result("causal", "llama", replays=12, eligible=12, calls=12)
    arch.sort(result, {}, {}, ["packed [5, 4]: differs by 0.5 (replayed)"])
    assert result.status == arch.UNEQUAL
    assert "packed [5, 4]" in result.reason


def test_a_result_survives_the_file_that_it_is_kept_in() -> None:
    result = arch.Result("causal", "llama", status=arch.REPLAYS, fallbacks={"MASK": 2})
    assert arch.Result(**json.loads(json.dumps(result.as_dict()))) == result


def test_reasons_name_no_place_on_this_machine() -> None:
    assert arch.shorten("at /home/me/site-packages/torch/nn/modules.py:12") == "at modules.py:12"
    assert len(arch.shorten("x " * 500)) <= 200
