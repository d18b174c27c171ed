"""``fgc.compile`` of a body and of a whole model: right, replayed, and compiled once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.models import tiny, tiny_causal_lm, tokens
from tests.packing import FAST, ONE, TAPE, equal, packed, per_request, replays

LENGTHS = [[5], [1], [2], [3, 4], [30], [1, 1, 1], [20, 7, 5], [64], [16] * 4, [1] * 16, [33, 31], [7]]


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3"])
def test_packed_requests_equal_each_request_alone(name: str) -> None:
    body = tiny(name)
    eager = copy.deepcopy(body)
    if name == "Gemma2":
        eager.set_attn_implementation("eager")  # sdpa drops the soft cap
    fgc.compile(body, max_tokens=64, **TAPE)
    for i, lengths in enumerate(LENGTHS):
        ids = tokens(sum(lengths), seed=i)
        equal(packed(body, ids, lengths, use_cache=False), per_request(eager, ids, lengths))
    report = fgc.report(body)
    assert sum(report.replays.values()) == len(LENGTHS)
    assert not report.fallbacks
    assert report.compiles == 1
    assert len(report.sites) == 2


def test_gemma_2_would_differ_without_its_soft_cap() -> None:
    body = tiny("Gemma2")
    eager = copy.deepcopy(body)
    eager.set_attn_implementation("eager")
    uncapped = copy.deepcopy(eager)
    for layer in uncapped.layers:
        layer.self_attn.attn_logit_softcapping = None
    ids = tokens(9)
    difference = per_request(eager, ids, [9]) - per_request(uncapped, ids, [9])
    assert float(difference.abs().max()) > 1e-2
    fgc.compile(body, max_tokens=16, **TAPE)
    equal(packed(body, ids, [9], use_cache=False), per_request(eager, ids, [9]))


def test_token_counts_up_to_the_ladder_and_above_it_are_one_compile() -> None:
    body = tiny("Llama", max_position_embeddings=4096, **ONE)
    eager = copy.deepcopy(body)
    fgc.compile(body, max_tokens=2048, buckets=[8, 64, 2048], **FAST)
    for n in (1, 2, 3, 30, 2047, 2048):
        ids = tokens(n, seed=n)
        equal(packed(body, ids, [n], use_cache=False), per_request(eager, ids, [n]))
    assert replays(body) == 6
    ids = tokens(2049)
    equal(packed(body, ids, [1024, 1025], use_cache=False), per_request(eager, ids, [1024, 1025]))
    report = fgc.report(body)
    assert sum(report.replays.values()) == 6
    assert report.fallbacks == {Reason.OVER_LADDER: 1}
    assert report.compiles == 1


def test_one_to_slots_requests_share_a_graph_and_more_run_compiled() -> None:
    body = tiny("Llama", **ONE)
    eager = copy.deepcopy(body)
    fgc.compile(body, buckets=[16], request_slots=4, **FAST)
    for requests in (1, 2, 3, 4, 3, 1, 4):
        ids = tokens(12, seed=requests)
        lengths = [12 // requests] * requests
        equal(packed(body, ids, lengths, use_cache=False), per_request(eager, ids, lengths))
    assert fgc.report(body).replays == {16: 7}
    ids = tokens(10)
    equal(packed(body, ids, [2] * 5, use_cache=False), per_request(eager, ids, [2] * 5))
    assert fgc.report(body).fallbacks == {Reason.OVER_SLOTS: 1}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_every_compiler_runs_the_same_body(compiler: str) -> None:
    body = tiny("Qwen3")
    eager = copy.deepcopy(body)
    graphs = "none" if compiler == "inductor" else "tape"
    fgc.compile(body, max_tokens=32, compiler=compiler, graphs=graphs)
    for lengths in ([5], [1], [3, 4], [20, 9]):
        ids = tokens(sum(lengths))
        equal(packed(body, ids, lengths, use_cache=False), per_request(eager, ids, lengths))
    report = fgc.report(body)
    assert report.compiles == 1
    assert sum(report.replays.values()) == (0 if graphs == "none" else 4)
    assert report.fallbacks == ({Reason.GRAPHS_OFF: 4} if graphs == "none" else {})


# -- a whole model with its head ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, torch.tensor([0, 2])], ids=["all", "last", "rows"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_logits_of_a_causal_lm_for_every_logits_to_keep(name: str, keep: Any) -> None:
    model = tiny_causal_lm(name, **ONE)
    if name == "Gemma2":
        model.set_attn_implementation("eager")
    eager = copy.deepcopy(model)
    fgc.compile(model, max_tokens=32, **TAPE)
    for n in (6, 9, 3, 30):
        ids = tokens(n)[None]
        with torch.no_grad():
            got = model(input_ids=ids, use_cache=False, logits_to_keep=keep)
            want = eager(input_ids=ids, use_cache=False, logits_to_keep=keep)
        assert type(got) is type(want)
        equal(got.logits, want.logits)
    report = fgc.report(model)
    assert sum(report.replays.values()) == 4
    assert report.compiles == 1


def test_b72_the_head_is_outside_of_the_graph() -> None:
    model = tiny_causal_lm("Llama", vocab_size=4096, **ONE)
    fgc.compile(model, max_tokens=32, **FAST)
    with torch.no_grad():
        model(input_ids=tokens(5)[None], use_cache=False)
    (graph,) = model.model.forward.graphs()
    for bucket in graph.runner.buckets.values():
        assert [tuple(t.shape) for t in bucket.outputs] == [(1, bucket.tokens, 32)]


def test_all_forms_of_the_call_live_side_by_side() -> None:
    model = tiny_causal_lm("Llama", **ONE)
    eager = copy.deepcopy(model)
    fgc.compile(model, max_tokens=32, **FAST)
    for _ in range(2):
        for keep in (0, 1, torch.tensor([1]), torch.tensor([0, 3])):
            for n in (7, 4):
                ids = tokens(n)[None]
                with torch.no_grad():
                    got = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
                    equal(got, eager(input_ids=ids, use_cache=False, logits_to_keep=keep).logits)
    assert fgc.report(model).compiles == 1
    assert replays(model) == 16


# -- without a batch ---------------------------------------------------------------------------------------------------


def test_without_a_batch_a_call_means_what_eager_means() -> None:
    body = tiny("Llama", **ONE)
    eager = copy.deepcopy(body)
    fgc.compile(body, max_tokens=32, **FAST)
    ids = tokens(9)[None]
    restarting = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    with torch.no_grad():
        for positions in (None, torch.arange(9)[None], restarting, torch.arange(9)[None] + 3):
            got = body(input_ids=ids, position_ids=positions, use_cache=False)[0]
            want = eager(input_ids=ids, position_ids=positions, use_cache=False)[0]
            equal(got, want)
    assert replays(body) == 4
    assert fgc.report(body).compiles == 1
