"""What prefill over a cache adds up to: log-probabilities, and a model with everything at once."""

from __future__ import annotations

import random
from typing import Any

import torch

import fullgraph_compile as fgc
from tests.models import tiny_causal_lm
from tests.paged.engine import Engine, cache_for, compiled, one_shot, texts

FEW: dict[str, Any] = {"buckets": [8, 64]}


# -- what is made of the hidden states ---------------------------------------------------------------------------------


def test_b87_log_probabilities_of_all_positions_and_of_the_last() -> None:
    model, eager = tiny_causal_lm("Llama"), tiny_causal_lm("Llama")
    body = compiled(model.model, **FEW)
    engine = Engine(body, cache_for(body), texts(13, 7))
    engine.step({0: 6})
    engine.step({0: 3, 1: 4})
    engine.step({0: 4, 1: 3})
    for text, parts in zip(engine.texts, engine.hidden, strict=True):
        with torch.inference_mode():
            want = eager(input_ids=text[None], use_cache=False).logits[0].log_softmax(-1)
            got = model.lm_head(torch.cat(parts)).log_softmax(-1)
            last = model.lm_head(parts[-1][-1]).log_softmax(-1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last, got[-1], rtol=1e-5, atol=1e-5)
    assert fgc.report(body).compiles == 1 and not fgc.report(body).fallbacks


# -- latent attention, experts, and everything at once -----------------------------------------------------------------


def deepseek() -> Any:
    return tiny_causal_lm(
        "DeepseekV3", num_key_value_heads=4, head_dim=4, moe_intermediate_size=16, n_routed_experts=4, n_group=1,
        num_experts_per_tok=2, n_shared_experts=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16,
        q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, experts_implementation="batched_mm",
    )  # fmt: skip


def test_b118_latent_attention_with_experts_over_random_chunks_and_shared_prefixes() -> None:
    rng = random.Random(3)
    model, eager = deepseek(), deepseek()
    body = compiled(model.model, **FEW)
    cache = cache_for(body, pages=400)
    assert {site[1:] for site in cache.sites} == {(12, 8)}, "heads of keys and of values differ in size"
    prompts = texts(*(rng.randint(1, 40) for _ in range(64)))
    for i in range(8, 64, 2):  # every other prompt begins like an earlier one
        prompts[i][:] = torch.cat([prompts[i - 8], prompts[i]])[: len(prompts[i])]
    engine = Engine(body, cache, prompts)
    while any(left := [r for r in range(64) if engine.done[r] < len(prompts[r])]):
        some = rng.sample(left[:8], min(len(left[:8]), rng.randint(1, 4)))
        for r in some:
            if r >= 8 and r % 2 == 0 and not engine.done[r] and engine.done[r - 8] == len(prompts[r - 8]):
                # All but the last token at most: one is left to prefill.
                same = min(len(prompts[r - 8]), len(prompts[r]) - 1)
                engine.pages[r] = cache.share(engine.pages[r - 8], same)
                engine.done[r] = len(engine.pages[r]) * cache.page_size
                engine.hidden[r] = [torch.cat(engine.hidden[r - 8])[: engine.done[r]]]
        engine.step({r: rng.randint(1, min(16, len(prompts[r]) - engine.done[r])) for r in some})
    differences = []
    for text, parts in zip(prompts, engine.hidden, strict=True):
        want, got = one_shot(eager.model, text), torch.cat(parts)
        differences.append((got - want).abs().mean())
        with torch.inference_mode():
            logits, mine = eager.lm_head(want[-1]), eager.lm_head(got[-1])
        best, second = logits.topk(2).values
        assert best - second < 1e-3 or mine.argmax() == logits.argmax()
    assert torch.stack(differences).mean() < 1e-5
    assert not fgc.report(body).fallbacks
