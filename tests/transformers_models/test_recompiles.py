"""Hundreds of random calls: nothing is compiled without need, and the report says how often it was."""

from __future__ import annotations

import random
from typing import Any

import torch

import fullgraph_compile as fgc
from tests.transformers_models.whole import padded, pair, rows_equal


def test_500_random_calls_compile_at_most_once_a_mode() -> None:
    """Shapes, sides of the padding, positions, what is returned: all served by one trace of each form of call."""
    model, eager = pair("Llama", num_hidden_layers=1)
    embed = eager.model.embed_tokens
    dice = random.Random(0)
    count, forms = 500, set()
    for i in range(count):
        lengths = [dice.randint(1, 9) for _ in range(dice.randint(1, 5))]
        side, form = dice.choice(["left", "right"]), (dice.random() < 0.3, dice.random() < 0.3)
        inputs: dict[str, Any] = padded(lengths, side, seed=i)
        mask = inputs["attention_mask"]
        if form[0]:
            inputs["inputs_embeds"] = embed(inputs.pop("input_ids")).detach()
        if dice.random() < 0.3:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        if min(lengths) == max(lengths) and dice.random() < 0.5:
            del inputs["attention_mask"]
        keep = dice.choice([0, 0, 1]) if side == "left" else 0
        with dice.choice([torch.no_grad, torch.inference_mode])():
            got, want = (
                m(**inputs, use_cache=form[1], logits_to_keep=keep, return_dict=i % 2 == 0)[0] for m in (model, eager)
            )
        rows_equal(got, want, mask[:, -keep:])
        forms.add(form)
    report = fgc.report(model)
    assert len(forms) == 4
    assert report.compiles == len(forms)
    assert sum(report.replays.values()) == count
    assert not report.fallbacks
