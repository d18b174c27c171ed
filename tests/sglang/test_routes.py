"""Which way a bucket runs is measured: with times that are given, each bucket goes where it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sglang.measuring import BATCHES
from tests.sglang.processes import environment, facts_of

TIMES = {
    "16": {"compiled": 1.03, "SGLang's": 1.02, "eager": 1.0},  # eager by three in a hundred
    "32": {"compiled": 1.015, "SGLang's": 1.0, "eager": 1.0},  # within the margin
    "64": {"compiled": 1.10, "SGLang's": 1.0, "eager": 1.05},
    "128": {"compiled": 9.0, "SGLang's": 9.5, "eager": 5.0},
}


@pytest.fixture(scope="module", params=["sglang", "reference"])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    env = environment("strict", {"compiler": "eager", "attention": request.param})
    return facts_of("tests.sglang.measuring", json.dumps(TIMES), env=env)


def test_a_bucket_takes_the_way_that_was_measured_best(facts: dict[str, Any]) -> None:
    ways = {line.split(":")[0]: line.split(": ")[1].split(" (")[0] for line in facts["report"]["measured_routes"]}
    assert ways == {
        "bucket 4": "compiled", "bucket 8": "compiled", "bucket 16": "eager", "bucket 32": "compiled",
        "bucket 64": "SGLang's", "bucket 128": "eager",
    }  # fmt: skip
    # A compiled graph has a program in it.
    assert facts["graphs"] == {"4": True, "8": True, "32": True, "64": False}
    assert facts["report"]["buckets"] == [4, 8, 32, 64]


@pytest.mark.parametrize("name", BATCHES)
def test_tokens_equal_eager_whichever_way_a_bucket_goes(facts: dict[str, Any], name: str) -> None:
    served, bucket = facts["served"][name], int(name.split()[0])
    assert served["equal"] and served["error"] < 1e-5
    by_graph = bucket not in (16, 128)
    assert served["replayed"] == by_graph and served["events"] == [["replay", bucket]] * by_graph


def test_eager_calls_are_counted_with_what_was_measured(facts: dict[str, Any]) -> None:
    [(reason, count)] = facts["report"]["fallbacks"].items()
    assert reason.startswith("measured:") and count == 2
    assert "eager (compiled 1.030, SGLang's 1.020, eager 1.000 ms)" in facts["report"]["first_fallbacks"][reason]


def test_a_measurement_counts_as_no_replay(facts: dict[str, Any]) -> None:
    assert facts["report"]["replays"] == {"8": 1, "32": 1, "64": 2}


def test_what_was_not_chosen_is_let_go_of(facts: dict[str, Any]) -> None:
    assert facts["kept"] == ["SGLang's 64", "compiled 32", "compiled 4", "compiled 8"]


def test_ways_take_turns_and_one_without_hope_is_called_once(facts: dict[str, Any]) -> None:
    assert facts["turns"][:6] == [["compiled", 32], ["SGLang's", 32], ["eager", 32]] * 2
    assert (facts["calls"]["SGLang's 128"], facts["calls"]["eager 128"], facts["calls"]["eager 32"]) == (1, 9, 9)
    assert [facts["by_graph"][f"{way} 128"] for way in ("compiled", "SGLang's", "eager")] == [True, True, False]


def test_the_ways_compute_the_same(facts: dict[str, Any]) -> None:
    assert all(error < 1e-4 for error in facts["same"].values())


def test_the_log_says_what_was_measured(facts: dict[str, Any]) -> None:
    [line] = [x for x in facts["log"].splitlines() if ": measured in " in x]
    assert "bucket 64: SGLang's (compiled 1.100, SGLang's 1.000, eager 1.050 ms)" in line
    assert "bucket 64: SGLang's" in facts["text"]
    [made] = [x for x in facts["log"].splitlines() if "fullgraph_compile 0" in x and "on SGLang" in x]
    assert "4 buckets [4, 8, 32, 64]" in made and "4 graphs" in made
