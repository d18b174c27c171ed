"""SGLang's prefill without graphs, with its own graphs, and with the compiled body in them: one table, one GPU.

On a machine with SGLang (0.5.17 was used) and this package installed, from the repository's root:

    python benchmarks/sglang_prefill.py

Where SGLang comes as an archive of packages for PYTHONPATH:

    SITE=$(mktemp -d) && tar -C $SITE -xJf sglang.tar.xz
    python -m pip install -q --no-deps --no-build-isolation -e .
    PYTHONPATH=$SITE python benchmarks/sglang_prefill.py --out results

Each route is a process of its own, one after another, on a Qwen3-8B-shaped model with the same random weights:
FlashInfer attention, 16 request slots, the same token buckets.  A time is the median of 30 calls of
ModelRunner.forward (staging, metadata, body, LM head), the device idle before each; all batches are timed twice, and
the second time counts.  "staging" is the part before the
graph's launch, "graph" the graph alone.  Then 200 random prompts in random batches go through each route, and the next
tokens of the compiled one are compared with those of SGLang's own full graphs: a difference is excused only where the
two logits are closer than what two eager batchings of that very prompt differ by.  ``--more 800`` sends so many others
too, for a share that is known better.

The first process of a machine builds kernels for one to two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sglang_route import HEADS, ROOT, ROUTES, SHAPES, run_route

MOST_EXCUSED, LEAST_REPLAYED = 0.02, 0.95
# Less is not enough for any route.
LEAST_SECONDS = 30


def logits_of(answer: dict[str, Any]) -> dict[int, float]:
    return dict(zip(answer["tokens"], answer["logits"], strict=True))


def eager_noise(one: dict[str, Any], other: dict[str, Any]) -> float:
    """What two eager batchings of a prompt differ by, at most, among the tokens that both rank high."""
    a, b = logits_of(one), logits_of(other)
    return max((abs(a[t] - b[t]) for t in a.keys() & b.keys()), default=0.0)


def compare(results: dict[str, Any], name: str, head: str, parts: tuple[str, ...] = ("",)) -> str:
    """Next tokens of a route against those of SGLang's own full graphs; ``parts`` are the prompts of the benchmark,
    and what was asked for beyond them."""

    def answers(route: str, kind: str = "answers") -> list[dict[str, Any]]:
        return [answer[head] for part in parts for answer in results[route][part + kind]]

    def total(of: str) -> int:
        return sum(results[name][part + of] for part in parts)

    reference, mine = answers("full"), answers(name)
    eager, alone = answers("disabled"), answers("disabled", "alone")
    differ, excused = 0, 0
    for theirs, ours, one, other in zip(reference, mine, eager, alone, strict=True):
        if theirs["tokens"][0] == ours["tokens"][0]:
            continue
        differ += 1
        gap = theirs["logits"][0] - logits_of(theirs).get(ours["tokens"][0], float("-inf"))
        excused += gap < eager_noise(one, other)
    share = total("replayed") / total("batches")
    good = differ == excused and excused <= MOST_EXCUSED * len(mine) and share >= LEAST_REPLAYED
    return (
        f"{name}, logits {HEADS[head]}: {len(mine)} prompts, {len({a['tokens'][0] for a in reference})} different next "
        f"tokens; {differ} differ from SGLang's full graphs, {excused} of them within eager's own noise (at most "
        f"{MOST_EXCUSED:.0%}); {share:.0%} of batches replayed (at least {LEAST_REPLAYED:.0%}): "
        f"{'PASS' if good else 'FAIL'}; of SGLang's own, full graphs "
        f"differ from eager for {different(reference, eager)}, "
        f"two eager batchings for {different(eager, alone)}"
    )


def different(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    return sum(a["tokens"][0] != b["tokens"][0] for a, b in zip(one, other, strict=True))


def table(results: dict[str, Any]) -> str:
    """What is known: a route that ended early has gaps."""
    names = list(results)
    lines = [f"| batch | {' | '.join(names)} | ours to the best of SGLang's |", "|---" * (len(names) + 2) + "|"]
    for requests, tokens in SHAPES:
        shape = f"{requests}x{tokens}"
        times = {n: results[n]["times"][shape]["ms"] for n in names if shape in results[n]["times"]}
        others = [t for n, t in times.items() if not n.startswith("ours")]
        mine = next((t for n, t in times.items() if n.startswith("ours")), None)
        factor = f"{min(others) / mine:.3f}" if mine is not None and others else "-"
        cells = " | ".join(f"{times[n]:.3f}{eager_mark(n, results[n], shape)}" if n in times else "-" for n in names)
        lines.append(f"| {shape} | {cells} | {factor} |")
    rows = {"start-up, s": "start_up_s", "capture, s": "capture_s", "graphs, GiB": "graph_gib"}
    for title, key in rows.items():
        lines.append(f"| {title} | {' | '.join(f'{results[n][key]:.2f}' for n in names)} | |")
    for part in ("staging_ms", "graph_ms"):
        for requests, tokens in SHAPES:
            shape = f"{requests}x{tokens}"
            values = [results[n]["times"].get(shape, {}).get(part) for n in names]
            if any(v is not None for v in values):
                cells = " | ".join("-" if v is None else f"{v:.3f}" for v in values)
                lines.append(f"| {part[:-3]} of {shape} | {cells} | |")
    return "\n".join(lines)


def eager_mark(name: str, result: dict[str, Any], shape: str) -> str:
    return "" if name == "disabled" or result["times"][shape]["replayed"] else " (eager)"


def comparisons(results: dict[str, Any]) -> list[str]:
    complete = {n for n, r in results.items() if "answers" in r}
    if not {"full", "disabled"} <= complete:
        return []
    asked: list[tuple[str, ...]] = [("",)]
    if all(results[name].get("more_answers") for name in complete):
        asked.append(("", "more_"))
    return [
        compare(results, name, head, parts)
        for parts in asked
        for name in results
        if name.startswith("ours") and name in complete
        for head in HEADS
    ]


def run(name: str, folder: Path, cpu: bool, seconds: float) -> int | str:
    """One route in its own process; its exit code, or that it took too long."""
    options = ROUTES[name][1]
    env = {
        **os.environ, "SGLANG_ENABLE_JIT_DEEPGEMM": "0", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
        "FULLGRAPH_COMPILE_SGLANG": "0" if options is None or cpu else "strict",
        "FULLGRAPH_COMPILE_SGLANG_OPTIONS": json.dumps(options or {}),
    }  # fmt: skip
    command = [sys.executable, __file__, "--only", name, "--out", str(folder), *["--cpu"] * cpu]
    return finish(command, env, folder / "log.txt", seconds)


def finish(command: list[str], env: dict[str, str], log: Path, seconds: float) -> int | str:
    """Run a command with all that it starts, its output in a file; its exit code, or that it took too long."""
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"no end within {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routes", default=";".join(ROUTES), help="separated by ';' (default: all)")
    parser.add_argument("--out", type=Path, default=None, help="folder for results and logs")
    parser.add_argument("--cpu", action="store_true", help="a tiny model without graphs: tries this script, no more")
    parser.add_argument("--more", type=int, default=0, help="prompts beyond the 200, for a share that is known better")
    parser.add_argument("--profile", action="store_true", help="also where the host's time goes: <route>/profile.txt")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=560, help="seconds for all routes (default: %(default)g)")
    arguments, begin = parser.parse_args(), time.perf_counter()
    out = arguments.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    if not arguments.only:
        os.environ["SGLANG_BENCH_MORE"] = str(arguments.more)
    if arguments.profile:
        os.environ["SGLANG_BENCH_PROFILE"] = "1"
    if arguments.only:
        run_route(arguments.only, out / "result.json", arguments.cpu)
    results: dict[str, Any] = {}
    for name in arguments.routes.split(";"):
        start = time.perf_counter()
        left = arguments.limit - (start - begin)
        if left < LEAST_SECONDS:
            print(f"{name}: not run, {left:.0f} s are left", flush=True)
            continue
        folder = out / name.replace(" ", "_").replace(",", "").replace("'", "")
        folder.mkdir(exist_ok=True)
        for stale in ("result.json", "profile.txt"):
            (folder / stale).unlink(missing_ok=True)
        ended = run(name, folder, arguments.cpu, left)
        log = (folder / "log.txt").read_text(errors="replace").splitlines()
        if ended != 0:
            print(f"{name}: failed ({ended}); the end of its log:\n" + "\n".join(log[-40:]), flush=True)
        if not (folder / "result.json").exists():
            continue
        results[name] = json.loads((folder / "result.json").read_text())
        print(f"\n{name}: {time.perf_counter() - start:.0f} s; {results[name]['versions']}", flush=True)
        for line in log:
            if "fullgraph_compile" in line or "prefill attention is planned" in line:
                print("   ", line[:900], flush=True)
        if (folder / "profile.txt").exists():
            print((folder / "profile.txt").read_text()[:6000], flush=True)
        print(table(results), flush=True)
    (out / "results.json").write_text(json.dumps(results))
    if not results:
        sys.exit(1)
    print("\n" + "\n".join(comparisons(results)))
    for name, result in results.items():
        if "report" in result:
            print(f"\n{name}\n{result['report']}")


if __name__ == "__main__":
    main()
