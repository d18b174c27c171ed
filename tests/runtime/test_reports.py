"""Warmup, release, close, report and explain."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from fullgraph_compile.report import Report
from tests.models import tiny, tokens
from tests.runtime.bodies import (
    Scaled,
    both_ways,
    check,
    check_replayed,
    compiled,
    equal,
    llama,
    ready,
    run,
    runners,
    small,
)


@both_ways
def test_warmup_captures_and_counts_nothing(way: str) -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    with torch.no_grad():
        report = fgc.warmup(body)
    assert report.ready
    assert report.buckets == (8, 16)
    assert not report.replays
    assert not report.fallbacks
    compiles = report.compiles
    check_replayed(body, eager, 7, 12, 3)
    assert fgc.report(body).compiles == compiles
    assert not fgc.report(body).fallbacks


SMALL_BUCKETS = {
    "four tokens": ({"max_tokens": 4}, (4,), (2, 3, 4)),
    "short requests": ({"max_tokens": 16, "context_length": 4, "request_slots": 16}, (8, 16), (2, 4)),
    "padding": ({"max_tokens": 128, "buckets": [128]}, (128,), (64, 128)),
    "padding and short requests": ({"max_tokens": 128, "buckets": [128], "context_length": 40}, (128,), ()),
}


@both_ways
@pytest.mark.parametrize("case", SMALL_BUCKETS)
def test_warmup_captures_whatever_sizes_the_buckets_serve_and_strict_is_for_the_users_calls(
    case: str, way: str
) -> None:
    options, buckets, sizes = SMALL_BUCKETS[case]
    module = llama()
    eager = copy.deepcopy(module)
    body = compiled(way, module, **{"buckets": None, **options}, strict=True)
    report = fgc.warmup(body)
    assert report.ready and report.buckets == buckets
    assert not report.replays and not report.fallbacks
    assert not {Reason.OVER_LADDER, Reason.OVER_CONTEXT, Reason.PADDING} & report.details.keys()
    check_replayed(body, eager, *sizes)
    with pytest.raises(fgc.FallbackError):
        run(body, 150)


def test_warmup_of_a_bucket_of_one_token_traces_a_call_that_is_right_at_every_size() -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, buckets=[1])
    assert fgc.warmup(body).buckets == (1,)
    check_replayed(body, eager, 1)
    check(body, eager, 7)
    assert fgc.report(body).compiles == 1


def test_a_warm_up_that_fails_is_not_counted() -> None:
    body = ready("compile", small())
    before = str(fgc.report(body))
    body.train()  # what runs eagerly is counted before it fails
    with pytest.raises(IndexError):
        fgc.warmup(body, input_ids=torch.full((1, 5), 10**6), position_ids=torch.arange(5)[None])
    assert str(fgc.report(body)) == before


def test_warmup_of_a_measured_ladder_of_few_tokens_measures_it() -> None:
    body = compiled("compile", llama(), buckets="measured", max_tokens=4, strict=True)
    report = fgc.warmup(body)
    assert report.ready and report.ladder is not None and [t.tokens for t in report.ladder.timings] == [4]
    assert not report.fallbacks


def test_an_example_that_no_bucket_serves_captures_nothing_and_the_report_says_why() -> None:
    body = compiled("compile", small(), strict=True)
    report = fgc.warmup(body, input_ids=tokens(17)[None], position_ids=torch.arange(17)[None])
    assert not report.ready and not report.fallbacks
    assert "why: more tokens than the largest bucket (17 tokens, largest bucket 16)" in str(report)
    with pytest.raises(fgc.FallbackError):
        run(body, 17)


@both_ways
def test_release_frees_and_the_next_call_captures_again_without_compiling(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    compiles = fgc.report(body).compiles
    graphs = [weakref.ref(b.graph) for r in runners(body) for b in r.buckets.values()]
    inputs = [weakref.ref(t) for r in runners(body) for b in r.buckets.values() for t in b.inputs.values()]
    fgc.release(body)
    gc.collect()
    assert [r() for r in (*graphs, *inputs)] == [None] * (len(graphs) + len(inputs))
    assert fgc.report(body).buckets == ()
    assert not fgc.report(body).ready
    fgc.release(body)  # twice is once
    check_replayed(body, eager, 7, 12)
    assert fgc.report(body).compiles == compiles
    assert fgc.report(body).ready


def test_close_gives_the_module_its_forward_back() -> None:
    module = small()
    eager = copy.deepcopy(module)
    before = dict(module.__dict__)
    body = ready("compile", module)
    assert body is module
    fgc.close(body)
    assert module.__dict__ == before
    check(module, eager, 7, 12)
    assert fgc.report(body).buckets == ()
    fgc.close(body)
    check_replayed(ready("compile", module), eager, 7, 12)


def test_close_keeps_a_forward_that_the_user_had_set() -> None:
    module = small()
    original = module.forward
    module.forward = lambda input_ids, position_ids: original(input_ids, position_ids) * 3
    mine = module.forward
    want = run(module, 7)
    body = ready("compile", module)
    equal(run(body, 7), want)
    fgc.close(body)
    assert module.forward is mine
    equal(run(module, 7), want)


def test_close_of_a_torch_compiled_body_frees_and_leaves_it_right() -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("torch.compile", module)
    fgc.close(body)
    assert fgc.report(body).buckets == ()
    check(body, eager, 7, 12)


@both_ways
def test_b73_nothing_keeps_a_dropped_body_alive(way: str) -> None:
    module = small()
    body = ready(way, module)
    dead = [weakref.ref(module), weakref.ref(runners(body)[0]), weakref.ref(module.embed.weight)]
    del module, body
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in dead] == [None, None, None]


@both_ways
def test_the_report_tells_a_person_what_happened(way: str) -> None:
    body = ready(way, tiny("Llama"), request_slots=2)
    fgc_report = fgc.report(body)
    run(body, 40), run(body, 40), run(body, 12)
    with fgc.PrefillBatch([2, 2, 3], device="cpu") as batch, torch.no_grad():
        body(input_ids=tokens(7)[None], position_ids=batch.position_ids[None], use_cache=False)
    report = fgc.report(body)
    assert report.fallbacks[Reason.OVER_LADDER] == 2
    assert report.fallbacks[Reason.OVER_SLOTS] == 1
    text = str(report)
    for part in ("8", "16", "40 tokens, largest bucket 16", "3 requests, 2 slots", "4/2 heads of 8", "2 request slots"):
        assert part in text
    for reason in (Reason.OVER_LADDER, Reason.OVER_SLOTS):
        assert reason.value in " ".join(text.split())
    assert report.padding[16] == 4
    # What was handed out before does not change.
    assert Reason.OVER_LADDER not in fgc_report.fallbacks
    assert [s.module.split(".")[-1] for s in report.sites] == ["self_attn", "self_attn"]


@both_ways
def test_the_sites_have_the_path_of_their_module(way: str) -> None:
    body = ready(way, tiny("Llama"))
    assert [s.module for s in fgc.report(body).sites] == ["layers.0.self_attn", "layers.1.self_attn"]


@both_ways
def test_explain_says_what_the_call_will_do_and_does_nothing(way: str) -> None:
    body = ready(way, small())
    before = str(fgc.report(body))
    with torch.no_grad():
        assert "bucket 8" in fgc.explain(body, input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])
        assert "bucket 16" in fgc.explain(body, tokens(9)[None], torch.arange(9)[None])
        over = fgc.explain(body, input_ids=tokens(40)[None], position_ids=torch.arange(40)[None])
        assert "more tokens than the largest bucket" in over
        with fgc.PrefillBatch([1] * 12, device="cpu") as batch:
            many = fgc.explain(body, input_ids=tokens(12)[None], position_ids=batch.position_ids[None])
        assert "bucket 16" in many
    assert str(fgc.report(body)) == before


@both_ways
def test_explain_of_a_call_with_gradients(way: str) -> None:
    body = ready(way, small())
    assert "gradients are enabled" in fgc.explain(body, input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])


def test_explain_before_anything_was_traced() -> None:
    body = compiled("compile", small())
    with torch.no_grad():
        assert "bucket 8" in fgc.explain(body, input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])
    assert fgc.report(body).compiles == 0


@both_ways
def test_b63_each_reason_is_logged_once_and_counted_each_time(way: str, caplog: pytest.LogCaptureFixture) -> None:
    body = ready(way, small(), request_slots=2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fullgraph_compile"):
        for n in (40, 41, 17, 40):
            run(body, n)
        for _ in range(3):
            with fgc.PrefillBatch([2, 2, 3], device="cpu") as batch, torch.no_grad():
                body(input_ids=tokens(7)[None], position_ids=batch.position_ids[None])
    said = [r.getMessage() for r in caplog.records if r.name == "fullgraph_compile"]
    assert len(said) == 2
    assert Reason.OVER_LADDER.value in said[0]
    assert "40 tokens" in said[0]
    assert Reason.OVER_SLOTS.value in said[1]
    report = fgc.report(body)
    assert report.fallbacks[Reason.OVER_LADDER] == 4
    assert report.fallbacks[Reason.OVER_SLOTS] == 3


def test_the_report_of_one_body_is_its_own_and_the_report_of_all_has_both() -> None:
    one, two = ready("compile", small()), ready("torch.compile", Scaled(layers=1).eval())
    run(one, 7), run(one, 7), run(two, 12)
    assert fgc.report(one).replays == {8: 4}
    assert fgc.report(two).replays[16] == 1
    everything = fgc.report()
    assert everything.replays[8] >= 5
    assert everything.replays[16] >= 1


def test_calls_of_our_own_are_in_no_count_and_are_not_taken_back_with_the_users() -> None:
    report = Report()
    report.begin()
    report.replayed(8, 5)
    then = report.copy()
    report.replayed(16, 9)
    report.drop()
    report.replayed(16, 9)
    report.fell_back(Reason.PADDING)
    report.device_reads += 1
    report.take_counts(then)
    assert str(report) == str(then) and "1 replayed, 0 not" in str(report)
    assert not report.dropped and not report.device_reads
    report.drop()
    assert (report.replays.total(), report.dropped) == (0, {8: 1})
