"""Capture one model and serve batches of many shapes: ``python -m tests.sglang.serving KIND``."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tests.sglang.one_model import BUCKETS, CONTEXT, SLOTS, OneModel, prompts
from tests.sglang.processes import tell

BATCHES = {
    "one token over a bucket": (5,),
    "a bucket filled": (16,),
    "several requests": (9, 1, 2, 13),
    "all slots": (30, 30, 30, 30),
    "one after many": (40,),
    "more requests than slots": (1, 1, 1, 1, 1),
    "more than twofold padding": (1,),
    "again": (9, 1, 2, 13),
}


def serve(model: OneModel, lengths: tuple[int, ...]) -> dict[str, Any]:
    batch = model.batch(prompts(*lengths))
    runner = model.runner.prefill_cuda_graph_runner
    model.double.events.clear()
    # What a stale slot would hold.
    for buffer in runner._prefill_static_buffers.values():
        buffer[len(lengths) :].fill_(7)
    seen: dict[str, Any] = {}
    head = model.runner.model.logits_processor.register_forward_pre_hook(
        lambda module, args: seen.update(tail_rows=args[1].shape[0], tail_requests=args[3].batch_size)
    )
    logits, replayed = model.forward(batch)
    head.remove()
    events = list(model.double.events)
    static = runner._prefill_static_buffers
    slots = {name: static[name][:SLOTS].tolist() for name in static}
    ids = runner.buffer_registry.get_slot("input_ids").buffer
    expected = model.eager(batch)
    return {
        **seen,
        "replayed": replayed,
        "events": events,
        "slots": slots,
        "padded_ids": ids[sum(lengths) : events[-1][1]].tolist() if replayed else [],
        "error": float((logits - expected).abs().max() / expected.abs().max()),
        "tokens": logits.argmax(-1).tolist() == expected.argmax(-1).tolist(),
        "tokens_differ": len(set(logits.argmax(-1).tolist())),
        "shape": list(logits.shape),
    }


def main(kind: str) -> None:
    logging.basicConfig(level=logging.INFO)
    model = OneModel(kind)
    lengths_captured: dict[int, list[int]] = {}
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    prepare = PrefillCudaGraphRunner.capture_prepare

    def noted(runner: Any, num_tokens: int) -> Any:
        batch, attention = prepare(runner, num_tokens)
        lengths_captured[num_tokens] = list(batch.extend_seq_lens_cpu)
        return batch, attention

    PrefillCudaGraphRunner.capture_prepare = noted
    runner = model.capture()
    after_capture = left_behind(model)
    from fullgraph_compile.integrations.sglang.plugin import _published

    capture_events = list(model.double.events)
    served = {name: serve(model, lengths) for name, lengths in BATCHES.items()}
    plugin = model.plugin
    import fullgraph_compile as fgc

    tell(
        {
            "backend": type(runner.backend).__name__,
            "bases": [c.__name__ for c in type(runner.backend).__mro__],
            "capture_events": capture_events,
            "captured_lengths": lengths_captured,
            "configured": list(_published(model.runner.server_args).bs),
            "wanted": BUCKETS,
            "limits": [CONTEXT, SLOTS],
            "served": served,
            "report": None if plugin is None else {**_plain(model.report), "text": str(fgc.report())},
            "left_behind": after_capture,
        }
    )


def _plain(report: Any) -> dict[str, Any]:
    from fullgraph_compile.integrations.sglang.counting import as_json

    return as_json(report)


def left_behind(model: OneModel) -> list[str]:
    """Traces of the capture in what eager batches run."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found = [name for name in ("forward",) if name in model.body.__dict__]
    found += [n for n, m in model.body.named_modules() if getattr(m, "is_torch_compile", False)]
    found += [n for n, m in model.body.named_modules() if hasattr(m, "_full_prefill_site")]
    if RadixAttention.forward.__module__ != RadixAttention.__module__:
        found.append("RadixAttention.forward")
    return found


if __name__ == "__main__":
    main(sys.argv[1])
