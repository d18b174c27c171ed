"""What cannot be captured: refused at start-up by name, and served eagerly or as SGLang has it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.processes import environment, facts_of


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return facts_of("tests.sglang.faults", env=environment("1", {"compiler": "eager"}))


def test_without_a_legal_bucket_prefill_runs_eagerly_and_says_why(facts: dict[str, Any]) -> None:
    told = facts["no bucket"]
    assert told["runner"] == "EagerRunner" and told["served"] == [[False, True]] * 2
    assert set(told["fallbacks"]) == {"NO_BUCKET"} and told["fallbacks"]["NO_BUCKET"] >= 2
    for part in ("TorchNativeAttnBackend", "context length 64", "4 request slots x 64 = 256 tokens"):
        assert part in told["log"][0]


def test_graphs_that_sglang_turned_off_itself_are_told_and_counted(facts: dict[str, Any]) -> None:
    told = facts["turned off"]
    assert told["served"] == [[False, True]] * 2 and set(told["fallbacks"]) == {"GRAPHS_OFF"}
    assert "SGLang turned 'full' prefill graphs off ('disabled')" in told["log"][0]


@pytest.mark.parametrize("name", ["no bucket", "turned off"])
def test_strict_ends_sglang_where_nothing_is_captured(facts: dict[str, Any], name: str) -> None:
    assert "FULLGRAPH_COMPILE_SGLANG=strict" in facts[f"{name}, strict"]["error"]


def test_what_the_user_chose_is_no_failure(facts: dict[str, Any]) -> None:
    assert facts["chosen"]["served"] == [[False, True]] * 2 and facts["chosen"]["fallbacks"] == {}


def test_an_op_that_mixes_rows_is_refused_by_node_and_nothing_is_captured(facts: dict[str, Any]) -> None:
    told = facts["row mixing"]
    assert told["runner"] == "EagerRunner" and told["served"] == [[False, True]] * 2
    assert "mean over the token dim mixes rows" in told["proof"] and "layers.0.mlp.act_fn" in told["proof"]
    assert "faults.py" in told["proof"]
    assert set(told["fallbacks"]) == {"UNPROVEN"}


def test_unsafe_error_ends_sglang_where_padding_is_not_proven(facts: dict[str, Any]) -> None:
    assert "mean over the token dim mixes rows" in facts["row mixing, error"]["error"]


def test_an_unknown_keyword_of_attention_is_named_and_the_body_captured_as_it_is(facts: dict[str, Any]) -> None:
    told = facts["unknown keyword"]
    assert told["compiles"] == 0 and told["served"] == [[True, True]] * 2
    assert "attention of layer 0 gets rel_bias, which is unknown" in told["log"][0]
    assert told["fallbacks"] == {}


def test_strict_ends_sglang_where_the_body_is_not_compiled(facts: dict[str, Any]) -> None:
    assert "rel_bias, which is unknown" in facts["unknown keyword, strict"]["error"]


def test_a_stream_for_work_beside_the_main_one_is_not_traced(facts: dict[str, Any]) -> None:
    told = facts["a second stream"]
    assert told["compiles"] == 1 and told["served"] == [[True, True]] * 2 and told["kept"]


def test_attention_modules_that_share_a_layer_number_are_told_apart(facts: dict[str, Any]) -> None:
    told = facts["two modules of one layer"]
    assert told["sites"] == 4 and told["compiles"] == 1 and told["served"] == [[True, True]] * 2


def test_flashinfer_is_called_without_sglangs_wrapper_and_its_copy(facts: dict[str, Any]) -> None:
    # Through the wrapper once, before the trace.
    told = facts["called directly"]
    assert told["wrapped"] == told["sites"] == 2


def test_a_capture_after_failed_ones_is_whole(facts: dict[str, Any]) -> None:
    told = facts["as it was"]
    assert told["compiles"] == 1 and told["served"] == [[True, True]] * 2 and told["fallbacks"] == {}


def test_request_slots_follow_sglangs_rule(facts: dict[str, Any]) -> None:
    # max(chunked_prefill_size // 512, 1) of 256 tokens.
    assert facts["slots by SGLang's rule"]["slots"] == 1
    assert facts["slots by SGLang's rule"]["served"] == [[False, True], [True, True]]


def test_request_slots_are_capped_by_the_request_pool(facts: dict[str, Any]) -> None:
    told = facts["slots above the pool"]
    assert told["slots"] == told["pool"] < 10000 and told["served"] == [[True, True]] * 2


def test_attention_without_metadata_at_fixed_places_is_refused_by_name(facts: dict[str, Any]) -> None:
    assert "TorchNativeAttnBackend has no metadata" in facts["attention without static metadata"]["error"]
