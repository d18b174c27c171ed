"""SGLang's engine with its own full prefill graphs, and with the compiled body in them: it starts, serves, replays.

    python benchmarks/sglang_engine.py            # see sglang_prefill.py for an SGLang that comes as an archive

Two engines, one after the other, on a Qwen3-8B-shaped model with SGLang's dummy weights; 200 random prompts sent at
once, then twenty one by one on a cached prefix.  Prints the scheduler's own report.  How tokens compare is told by
sglang_prefill.py: dummy weights leave most of the two best logits level.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sglang_prefill import finish
from sglang_route import BUCKETS, QWEN3_8B, ROOT, SLOTS, random_prompts, versions

LENGTHS = [4 + 37 * i % 117 for i in range(200)]


def serve() -> dict[str, Any]:
    import sglang

    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(QWEN3_8B))
    start = time.perf_counter()
    engine = sglang.Engine(
        model_path=folder, load_format="dummy", skip_tokenizer_init=True, attention_backend="flashinfer",
        mem_fraction_static=0.5, context_length=8192, chunked_prefill_size=2048, grammar_backend="none",
        sampling_backend="pytorch", max_running_requests=64, log_level="info",
        cuda_graph_config={"prefill": {"backend": "full", "bs": BUCKETS, "full_prefill_max_req": SLOTS}},
    )  # fmt: skip
    started = time.perf_counter() - start
    greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    prompts = random_prompts(LENGTHS, seed=3)
    at_once = engine.generate(input_ids=prompts, sampling_params=greedy)
    longer = [[*prompt, *more] for prompt, more in zip(prompts[:20], random_prompts([30] * 20, seed=4), strict=True)]
    one_by_one = [engine.generate(input_ids=ids, sampling_params=greedy) for ids in longer]
    state = engine.get_server_info()["internal_states"][0]
    return {
        "start_up_s": round(started, 1),
        "tokens": [a["output_ids"] for a in (*at_once, *one_by_one)],
        "cached": sum(a["meta_info"]["cached_tokens"] for a in one_by_one),
        "reports": state.get("fullgraph_compile"),
        "versions": versions(),
    }


def report(switch: str, result: dict[str, Any], log: list[str]) -> None:
    print(
        f"switch {switch}: started in {result['start_up_s']} s, {result['cached']} cached tokens; {result['versions']}"
    )
    for line in log:
        if "fullgraph_compile 0" in line or "prefill attention" in line or "no graph replayed" in line:
            print("   ", line[:900])
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for results and logs")
    parser.add_argument("--limit", type=float, default=560, help="seconds for both engines (default: %(default)g)")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments, begin = parser.parse_args(), time.perf_counter()
    if arguments.serve:
        arguments.serve.write_text(json.dumps(serve()))
        os._exit(0)
    out = arguments.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for switch in ("strict", "0"):
        env = {
            **os.environ, "SGLANG_ENABLE_JIT_DEEPGEMM": "0", "HF_HUB_OFFLINE": "1", "FULLGRAPH_COMPILE_SGLANG": switch,
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
        }  # fmt: skip
        file, log = out / f"engine_{switch}.json", out / f"engine_{switch}.log"
        left = arguments.limit - (time.perf_counter() - begin)
        ended = finish([sys.executable, __file__, "--serve", str(file)], env, log, max(left, 1))
        lines = log.read_text(errors="replace").splitlines()
        if ended != 0 or not file.exists():
            print(f"switch {switch}: failed ({ended}); the end of its log:\n" + "\n".join(lines[-60:]), flush=True)
            continue
        results[switch] = json.loads(file.read_text())
        report(switch, results[switch], lines)
    if "strict" in results:
        print(json.dumps(results["strict"]["reports"], indent=1))
    if len(results) < 2:
        sys.exit(1)
    on, off = results["strict"]["tokens"], results["0"]["tokens"]
    print(f"{sum(a == b for a, b in zip(off, on, strict=True))} of {len(on)} answers are the same")


if __name__ == "__main__":
    main()
