"""Captures that cannot be had, one after another, on one model: ``python -m tests.sglang.faults``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.sglang.one_model import BUCKETS, SLOTS, OneModel, prompts
from tests.sglang.processes import tell


@contextlib.contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def outcome(model: OneModel, log: Log, **double: Any) -> dict[str, Any]:
    """Capture, serve two batches, and tell."""
    log.lines.clear()
    try:
        runner = model.capture(**{"buckets": BUCKETS, "slots": SLOTS, "backend": "full", **double})
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    served = []
    for lengths in ((9, 4), (40,)):
        batch = model.batch(prompts(*lengths))
        logits, replayed = model.forward(batch)
        served.append([replayed, bool((logits - model.eager(batch)).abs().max() < 1e-4)])
    report = model.report
    return {
        "runner": type(runner).__name__,
        "served": served,
        "compiles": report.compiles,
        "proof": report.proof,
        "fallbacks": {reason.name: count for reason, count in report.fallbacks.items()},
        "details": {reason.name: detail for reason, detail in report.details.items()},
        "log": [line for line in log.lines if "SGLang prefill" in line],
    }


def row_mixing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def mixed(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, x - x.mean(0, keepdim=True), *args, **kwargs)

    return mixed


def second_attention(attention_class: type) -> Callable[..., Any]:
    """A layer with two attention modules of one layer number, which differ in heads and scale."""

    def attend(self: Any, q: Any, k: Any, v: Any, forward_batch: Any, **kwargs: Any) -> Any:
        whole = self.first(q, k, v, forward_batch, **kwargs)
        half = self.second(q.view(-1, 4, 16)[:, :2].reshape(-1, 32), k, v, forward_batch, save_kv_cache=False)
        return whole + torch.cat((half, half), -1)

    class Both(nn.Module):
        def __init__(self, first: Any) -> None:
            super().__init__()
            self.first = first
            self.second = attention_class(2, 16, 0.5, 2, first.layer_id)
            self.layer_id = first.layer_id

    Both.forward = attend
    return Both


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    log = Log()
    logging.getLogger("fullgraph_compile").addHandler(log)
    model = OneModel("qwen3")
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention

    settings = model.plugin.settings
    facts: dict[str, Any] = {}

    strict = type(settings)(on=True, compiler="eager", strict=True)
    for name, double in {"no bucket": {"buckets": [99999999]}, "turned off": {"backend": "disabled"}}.items():
        facts[name] = outcome(model, log, **double)
        with changed(model.plugin, "settings", strict):
            facts[f"{name}, strict"] = outcome(model, log, **double)
    chosen = {("prefill", "backend")}
    with (
        changed(model.runner.server_args, "_cuda_graph_config_locked", chosen),
        changed(model.plugin, "settings", strict),
    ):
        facts["chosen"] = outcome(model, log, backend="disabled")

    with changed(SiluAndMul, "forward_native", row_mixing(SiluAndMul.forward_native)):
        facts["row mixing"] = outcome(model, log)
        with changed(model.plugin, "settings", type(settings)(on=True, compiler="eager", unsafe="error")):
            facts["row mixing, error"] = outcome(model, log)

    layers = model.body.layers
    attend = TorchNativeAttnBackend.forward_extend
    ignoring = lambda self, *args, rel_bias=None, **kwargs: attend(self, *args, **kwargs)  # noqa: E731
    with changed(TorchNativeAttnBackend, "forward_extend", ignoring), unknown_keyword(layers):
        facts["unknown keyword"] = outcome(model, log)
        with changed(model.plugin, "settings", strict):
            facts["unknown keyword, strict"] = outcome(model, log)

    wrapped: list[int] = []
    forward = RadixAttention.forward
    with (
        changed(TorchNativeAttnBackend, "__name__", "FlashInferAttnBackend"),
        changed(RadixAttention, "forward", lambda *args, **kwargs: (wrapped.append(1), forward(*args, **kwargs))[1]),
    ):
        model.capture(buckets=BUCKETS, slots=SLOTS)
        facts["called directly"] = {"wrapped": len(wrapped), "sites": len(model.report.sites)}

    for layer in layers:
        # As each of Qwen3's has on a GPU, for the norm of its keys.
        layer.self_attn.alt_stream = torch.Stream(device="cpu")
    facts["a second stream"] = {**outcome(model, log), "kept": layers[0].self_attn.alt_stream is not None}
    for layer in layers:
        layer.self_attn.alt_stream = None

    both = second_attention(RadixAttention)
    firsts = [layer.self_attn.attn for layer in layers]
    for layer in layers:
        layer.self_attn.attn = both(layer.self_attn.attn)
    facts["two modules of one layer"] = {**outcome(model, log), "sites": len(model.report.sites)}
    for layer, first in zip(layers, firsts, strict=True):
        layer.self_attn.attn = first

    facts["as it was"] = outcome(model, log)
    facts["slots by SGLang's rule"] = outcome(model, log, slots=None)
    facts["slots by SGLang's rule"]["slots"] = model.report.slots
    facts["slots above the pool"] = outcome(model, log, slots=10000)
    facts["slots above the pool"]["slots"] = model.report.slots
    facts["slots above the pool"]["pool"] = int(model.runner.req_to_token_pool.size)
    del TorchNativeAttnBackend.init_forward_metadata_out_graph
    facts["attention without static metadata"] = outcome(model, log)
    tell(facts)


@contextlib.contextmanager
def unknown_keyword(layers: Any) -> Iterator[None]:
    """Each attention call gets one more keyword, which SGLang passes on to its backend."""
    from sglang.srt.layers.radix_attention import RadixAttention

    def forward(attention: Any) -> Callable[..., Any]:
        return lambda q, *args, **kwargs: RadixAttention.forward(
            attention, q, *args, rel_bias=q.new_zeros(q.shape[0], 1), **kwargs
        )

    for layer in layers:
        layer.self_attn.attn.forward = forward(layer.self_attn.attn)
    try:
        yield
    finally:
        for layer in layers:
            del layer.self_attn.attn.forward


if __name__ == "__main__":
    main()
