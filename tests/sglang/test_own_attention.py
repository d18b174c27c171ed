"""Our own attention on SGLang's real pool, runner and scheduler; by the reference, as a CPU has no kernels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.processes import environment, facts_of
from tests.sglang.serving import BATCHES

MODELS = {"llama": "eager", "qwen3": "aot_eager"}
REPLAYED = [n for n in BATCHES if not n.startswith("more")]


@pytest.fixture(scope="module", params=sorted(MODELS))
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    env = environment("strict", {"compiler": MODELS[request.param], "attention": "reference"})
    return facts_of("tests.sglang.owning", request.param, env=env)


@pytest.mark.parametrize("name", BATCHES)
def test_tokens_equal_eager(facts: dict[str, Any], name: str) -> None:
    served = facts["served"][name]
    assert served["tokens"] and served["error"] < 1e-5
    assert served["replayed"] == (name in REPLAYED)


@pytest.mark.parametrize("name", REPLAYED)
def test_keys_and_values_are_where_sglang_put_them_and_nowhere_else(facts: dict[str, Any], name: str) -> None:
    written = facts["written"][name]
    assert written["replayed"] and written["error"] < 1e-5 and written["others"]


@pytest.mark.parametrize("name", REPLAYED)
def test_sglangs_attention_prepares_nothing_for_a_replay(facts: dict[str, Any], name: str) -> None:
    assert [e[0] for e in facts["served"][name]["events"]] == ["replay"]


def test_sglangs_attention_prepares_the_first_capture_only(facts: dict[str, Any]) -> None:
    # What the compiled body is compared with is SGLang's own.
    assert [e[0] for e in facts["captured"]].count("out") == 1 and facts["captured"][0][:2] == ["out", True]
    assert facts["left_behind"] == [] and facts["report"]["compiles"] == 1


def test_the_line_at_start_up_says_who_attends(facts: dict[str, Any]) -> None:
    [line] = [x for x in facts["log"].splitlines() if "fullgraph_compile 0" in x and "on SGLang" in x]
    assert "attention by reference on SGLang's KV pool" in line
    assert "planned by SGLang" not in facts["log"]


@pytest.fixture(scope="module")
def engine(serve_engine: Any) -> dict[str, Any]:
    """A prompt is prefilled in chunks, and each chunk after the first has a prefix."""
    facts: dict[str, Any] = serve_engine(
        "strict", {"compiler": "eager", "attention": "reference"}, chunked_prefill_size=16
    )
    return facts


def test_cached_prefixes_chunks_and_decode_after_them_give_the_same_tokens(
    plain: dict[str, Any], engine: dict[str, Any]
) -> None:
    assert engine["tokens"] == plain["tokens"]
    assert engine["cached"][3][0] >= 32
    [report] = engine["reports"]
    # 40 tokens are 16 + 16 + 8, after 16 and after 32.
    assert report["replays"]["16"] >= 2 and report["replays"]["8"] >= 1
    assert "attention by reference on SGLang's KV pool" in engine["log"]
