"""The plugin in a real engine: found by SGLang in its scheduler process, switched by one variable."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def served(serve_engine: Any) -> dict[str, Any]:
    facts: dict[str, Any] = serve_engine("strict", {"compiler": "aot_eager"})
    return facts


def test_switched_off_the_plugin_does_nothing(plain: dict[str, Any]) -> None:
    assert plain["reports"] is None
    assert "fullgraph_compile 0" not in plain["log"]


def test_tokens_equal_those_without_the_plugin(plain: dict[str, Any], served: dict[str, Any]) -> None:
    assert served["tokens"] == plain["tokens"]
    assert len({tuple(t) for answers in served["tokens"] for t in answers}) > 3


def test_a_cached_prefix_replays_a_bucket_of_the_new_tokens(served: dict[str, Any]) -> None:
    assert served["cached"][3][0] >= 32
    [report] = served["reports"]
    assert report["replays"].get("8") or report["replays"].get("16")


def test_the_scheduler_process_shows_what_was_captured_replayed_and_refused(served: dict[str, Any]) -> None:
    [report] = served["reports"]
    assert report["name"] == "SGLang prefill of Qwen3ForCausalLM" and report["ready"]
    assert report["buckets"] == [4, 8, 16, 32, 64, 128] and report["request_slots"] == 4
    assert report["compiles"] == 1 and sum(report["replays"].values()) >= 3
    assert report["padding_proof"].startswith("proven safe")
    assert all(isinstance(n, int) and n > 0 for n in report["fallbacks"].values())


def test_one_line_of_the_scheduler_says_so(served: dict[str, Any]) -> None:
    [line] = [x for x in served["log"].splitlines() if "fullgraph_compile 0" in x and "on SGLang" in x]
    assert "aot_eager, 1 trace" in line and "6 graphs" in line
