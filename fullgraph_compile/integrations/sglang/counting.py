"""Why SGLang runs a prefill batch eagerly: told from the batch and the runner's limits, and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.report import Report

# SGLang refuses a bucket above this many times the tokens.
MOST_PADDING = 2


def reason_of(runner: Any, batch: Any) -> tuple[Reason, str]:
    """Why ``runner.can_run_graph(batch)`` said no.

    Args:
        runner: SGLang's prefill runner.
        batch: its batch.
    """
    tokens, requests = len(batch.input_ids), int(batch.batch_size)
    buckets = runner.capture_num_tokens
    if requests > runner._capture_req_slots:
        return Reason.OVER_SLOTS, f"{requests} requests, {runner._capture_req_slots} slots"
    if tokens > buckets[-1]:
        return Reason.OVER_LADDER, f"{tokens} tokens, largest bucket {buckets[-1]}"
    nearest = next(b for b in buckets if b >= tokens)
    if nearest > MOST_PADDING * tokens:
        return Reason.PADDING, f"{tokens} tokens, nearest bucket {nearest}"
    given = [n for n in ("input_embeds", "replace_embeds", "lora_ids") if _given(getattr(batch, n, None))]
    if given:
        return Reason.ARGUMENTS, f"the batch has {', '.join(given)}"
    return Reason.ARGUMENTS, f"SGLang's runner refused a batch of {requests} requests and {tokens} tokens"


def _given(value: Any) -> bool:
    return any(x is not None for x in value) if isinstance(value, (list, tuple)) else value is not None


def count_fallbacks(runner: Any, report: Report, eager: Mapping[int, str]) -> None:
    """Count the batches that the runner sends to eager, by reason.

    Args:
        eager: buckets that run without a graph, and why.
    """
    decide: Callable[[Any], bool] = runner.can_run_graph

    def can_run_graph(batch: Any) -> bool:
        if decide(batch):
            bucket = next(b for b in runner.capture_num_tokens if b >= len(batch.input_ids))
            if bucket not in eager:
                return True
            report.fell_back(Reason.CROSSOVER, eager[bucket])
            return False
        # Verifying a draft is decode's business.
        if not batch.forward_mode.is_target_verify():
            report.fell_back(*reason_of(runner, batch))
        return False

    runner.can_run_graph = can_run_graph


def count_all(eager_runner: Any, reason: Reason, detail: str, report: Report) -> None:
    """Count each prefill batch, as none replays a graph."""
    execute = eager_runner.execute

    def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify():
            report.fell_back(reason, detail)
        return execute(batch, *args, **kwargs)

    eager_runner.execute = counted


def as_json(report: Report) -> dict[str, Any]:
    """A report as plain data: what ``get_server_info`` shows."""
    return {
        "ready": report.ready,
        "buckets": list(report.buckets),
        "request_slots": report.slots,
        "attention_sites": len(report.sites),
        "padding_proof": report.proof,
        "compiles": report.compiles,
        "compile_seconds": round(report.compile_seconds, 3),
        "capture_seconds": round(report.capture_seconds, 3),
        "measured_routes": list(report.routes),
        "replays": {str(bucket): count for bucket, count in sorted(report.replays.items())},
        "padded_rows": {str(bucket): count for bucket, count in sorted(report.padding.items())},
        "fallbacks": {reason.value: count for reason, count in report.fallbacks.items()},
        "first_fallbacks": {reason.value: detail for reason, detail in report.details.items()},
    }
