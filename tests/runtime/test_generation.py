"""``generate`` of a compiled model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from tests.models import tiny_causal_lm, tokens
from tests.runtime.bodies import OPTIONS, equal, replays, run


@pytest.mark.parametrize("part", ["model", "body"])
def test_generate_of_a_compiled_model_is_right(part: str) -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    fgc.compile(model if part == "model" else model.model, **OPTIONS)
    ids = torch.stack([tokens(6), tokens(6, 2)])
    for prompt in (ids[:1], ids):
        settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(prompt, **settings), eager.generate(prompt, **settings))
    # Its prefills are replayed; its decode steps are transformers' own.
    assert replays(model) == 2
    assert set(fgc.report(model).fallbacks) == {fgc.Reason.ARGUMENTS}
    with torch.no_grad():
        out = model.model(input_ids=ids[:1], use_cache=False) if part == "body" else run(model, 6)
        want = eager.model(input_ids=ids[:1], use_cache=False) if part == "body" else run(eager, 6)
    equal(out[0], want[0])
    assert replays(model) == 3


def test_generate_of_a_model_compiled_by_torch_in_place_is_right() -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    model.compile(backend="full_prefill", options=OPTIONS)
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(tokens(6)[None], **settings), eager.generate(tokens(6)[None], **settings))
