"""Buckets whose ways were measured, with times that are given: ``python -m tests.sglang.measuring``."""

from __future__ import annotations

import gc
import json
import logging
import sys
import weakref
from collections import Counter
from typing import Any

from fullgraph_compile.integrations.sglang import routes
from fullgraph_compile.integrations.sglang.counting import as_json
from tests.sglang.one_model import OneModel, prompts
from tests.sglang.processes import tell

BATCHES = {"8": (6,), "16": (9, 4), "32": (9, 1, 2, 13), "64": (40,), "128": (30, 30, 30, 30), "64 again": (50,)}


def main(times: dict[str, dict[str, float]]) -> None:
    logging.basicConfig(level=logging.INFO)
    model = OneModel("qwen3")
    called: list[tuple[str, int]] = []
    watched: dict[str, Any] = {}
    outcomes: dict[tuple[str, int], Any] = {}

    def timed(way: str, bucket: int, call: Any, batch: Any, synchronize: Any) -> float:
        synchronize()
        output = call(batch)
        outcomes[way, bucket] = [
            bool(output.can_run_graph), int(batch.input_ids.sum()), output.logits_output.next_token_logits.clone(),
        ]  # fmt: skip
        called.append((way, bucket))
        return times.get(str(bucket), {}).get(way, {"compiled": 1.0, "SGLang's": 1.2, "eager": 1.4}[way])

    def settle(backend: Any, theirs: Any, *args: Any) -> None:
        for way, graphs in (("compiled", backend._graphs), ("SGLang's", theirs._graphs)):
            watched.update({f"{way} {key.size}": weakref.ref(graph) for key, graph in graphs.items()})
        settled(backend, theirs, *args)

    settled = routes.settle
    routes.timed, routes.settle, routes.unmeasurable = timed, settle, lambda runner: None
    runner = model.capture()
    gc.collect()
    served = {}
    for name, lengths in BATCHES.items():
        batch = model.batch(prompts(*lengths))
        model.double.events.clear()
        logits, replayed = model.forward(batch)
        expected = model.eager(batch)
        served[name] = {
            "replayed": replayed,
            "events": [e for e in model.double.events if e[0] == "replay"],
            "equal": logits.argmax(-1).tolist() == expected.argmax(-1).tolist(),
            "error": float((logits - expected).abs().max() / expected.abs().max()),
        }
    one = [way_bucket for way_bucket in called if way_bucket[1] == 32]
    tell(
        {
            "kept": sorted(name for name, graph in watched.items() if graph() is not None),
            "graphs": {str(key.size): bool(graph) for key, graph in runner.backend._graphs.items()},
            "report": as_json(model.report),
            "text": str(model.report),
            "served": served,
            "turns": one,
            "calls": Counter(f"{way} {bucket}" for way, bucket in called),
            "by_graph": {f"{way} {bucket}": outcome[0] for (way, bucket), outcome in outcomes.items()},
            "same": {
                str(b): max(
                    float((outcomes[way, b][2] - outcomes["eager", b][2]).abs().max())
                    for way in routes.WAYS
                    if outcomes[way, b][1] == outcomes["eager", b][1]
                )
                for b in runner.capture_num_tokens
            },
            "runner": model.runner.prefill_cuda_graph_runner is runner,
        }
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
