"""Real SGLang models through the real prefill runner: what is captured, replayed and sent to eager."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.processes import environment, facts_of
from tests.sglang.serving import BATCHES

# One with Inductor, as it takes a while to build its kernels.
MODELS = {"llama": "inductor", "qwen2": "aot_eager", "qwen3": "eager"}
REPLAYED = [n for n in BATCHES if not n.startswith("more")]


@pytest.fixture(scope="module", params=sorted(MODELS))
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    env = environment("strict", {"compiler": MODELS[request.param]})
    return facts_of("tests.sglang.serving", request.param, env=env)


def test_the_compiled_body_is_captured_by_the_full_backend(facts: dict[str, Any]) -> None:
    assert facts["backend"] == "FullPrefillCompileBackend"
    assert "FullCudaGraphBackend" in facts["bases"]
    report = facts["report"]
    assert report["ready"] and report["attention_sites"] == 2
    assert report["padding_proof"].startswith("proven safe")


def test_one_trace_serves_all_buckets_and_nothing_is_compiled_while_serving(facts: dict[str, Any]) -> None:
    assert facts["report"]["compiles"] == 1


@pytest.mark.parametrize("name", BATCHES)
def test_tokens_equal_eager(facts: dict[str, Any], name: str) -> None:
    served = facts["served"][name]
    assert served["tokens"] and served["error"] < 1e-5
    assert served["shape"][0] == len(BATCHES[name])


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_replays_the_nearest_bucket_or_none(facts: dict[str, Any], name: str) -> None:
    served, tokens = facts["served"][name], sum(BATCHES[name])
    nearest = next(b for b in facts["wanted"] if b >= tokens)
    assert served["replayed"] == (name in REPLAYED)
    assert [e for e in served["events"] if e[0] == "replay"] == ([["replay", nearest]] if name in REPLAYED else [])


def test_eager_batches_are_counted_by_reason(facts: dict[str, Any]) -> None:
    fallbacks = facts["report"]["fallbacks"]
    assert fallbacks == {
        "more requests than request slots": 1,
        "the nearest bucket would be mostly padding (max_padding)": 1,
    }
    assert "5 requests, 4 slots" in facts["report"]["text"]
    assert facts["report"]["replays"] == {"8": 1, "16": 1, "32": 2, "64": 1, "128": 1}
    assert facts["report"]["padded_rows"] == {"8": 3, "16": 0, "32": 14, "64": 24, "128": 8}


@pytest.mark.parametrize("name", REPLAYED)
def test_unused_slots_are_sentinels_at_every_replay(facts: dict[str, Any], name: str) -> None:
    slots, lengths = facts["served"][name]["slots"], BATCHES[name]
    unused = slice(len(lengths), facts["limits"][1])
    assert slots["extend_seq_lens"][: len(lengths)] == list(lengths)
    for field in ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "req_pool_indices", "orig_seq_lens"):
        assert not any(slots[field][unused]), field
    assert set(slots["extend_start_loc"][unused]) <= {sum(lengths)}
    assert not any(facts["served"][name]["padded_ids"])


@pytest.mark.parametrize("name", REPLAYED)
def test_metadata_is_prepared_for_all_slots_before_the_replay(facts: dict[str, Any], name: str) -> None:
    kinds = [e[0] for e in facts["served"][name]["events"]]
    assert kinds == ["out", "replay"]
    assert facts["served"][name]["events"][0] == ["out", False, facts["limits"][1]]


def test_metadata_is_prepared_before_each_capture_largest_bucket_first(facts: dict[str, Any]) -> None:
    events = facts["capture_events"]
    order = [e[1] for e in events if e[0] == "body"]
    assert order == sorted(order, reverse=True)
    for at, event in enumerate(events):
        if event[0] == "body" and (at == 0 or events[at - 1] != event):
            assert events[at - 1] == ["out", True, facts["limits"][1]]


@pytest.mark.parametrize("name", REPLAYED)
def test_the_tail_runs_on_live_rows_only(facts: dict[str, Any], name: str) -> None:
    served = facts["served"][name]
    assert (served["tail_rows"], served["tail_requests"]) == (sum(BATCHES[name]), len(BATCHES[name]))


def test_buckets_above_the_capacity_are_dropped_and_written_back(facts: dict[str, Any]) -> None:
    context, slots = facts["limits"]
    legal = [b for b in facts["wanted"] if b <= context * slots]
    assert facts["configured"] == facts["report"]["buckets"] == legal != facts["wanted"]


def test_a_bucket_is_captured_as_the_fewest_legal_requests(facts: dict[str, Any]) -> None:
    assert facts["captured_lengths"]["128"] == [64, 64, 0, 0]
    assert facts["captured_lengths"]["32"] == [32, 0, 0, 0]


def test_eager_batches_find_the_model_as_it_was(facts: dict[str, Any]) -> None:
    assert facts["left_behind"] == []


def test_one_line_says_what_was_done(facts: dict[str, Any]) -> None:
    [line] = [x for x in facts["log"].splitlines() if "fullgraph_compile 0" in x and "on SGLang" in x]
    for part in (
        "2 attention sites",
        "6 buckets [4, 8, 16, 32, 64, 128]",
        "4 request slots",
        "6 graphs",
        "proven safe",
    ):
        assert part in line


def test_without_the_switch_nothing_is_changed() -> None:
    facts = facts_of("tests.sglang.serving", "qwen3", env=environment("0"))
    assert facts["backend"] == "FullCudaGraphBackend" and facts["report"] is None
    assert all(served["tokens"] for served in facts["served"].values())
    assert "fullgraph_compile 0" not in facts["log"]
