"""Which batches may use a graph, and what is said of those that may not.

That the default ladder ends at ``max_tokens`` for any of them (B62) is tested with the ladder.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import FallbackError, Options, Reason
from tests.models import T2, tiny_causal_lm, tokens
from tests.reports.cases import (
    DRESSES,
    TAPE,
    Pair,
    Recurrent,
    either_way,
    equal,
    one_call,
    only,
    packed,
    pair,
    per_request,
    seen_by,
)


@pytest.fixture(scope="module")
def t2() -> Pair:
    return pair(T2(), buckets=[4, 8, 16, 32], request_slots=4)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_b54_graphs_are_captured_with_requests_of_at_most_context_length() -> None:
    made = pair(T2(), buckets=[4, 8, 16], request_slots=4, context_length=8)
    assert made.report.buckets == (4, 8, 16)
    captures = {tuple(ns) for ns, static in made.attention.planned if static.slots == 4 and sum(ns) == static.tokens}
    assert captures == {(4,), (8,), (8, 8)}  # that unused slots are empty is checked as each batch is staged
    made.same([8, 8], bucket=16)
    made.same([9, 7])
    assert made.report.fallbacks == {Reason.OVER_CONTEXT: 1}


def test_b54_a_bucket_that_no_legal_batch_fills_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fullgraph_compile"):
        made = pair(T2(), buckets=[4, 8, 16], request_slots=1, context_length=8)
    assert made.report.buckets == (4, 8)
    made.same([8], bucket=8)
    made.same([9])
    assert "16" in caplog.text
    assert "context_length" in caplog.text


def test_b54_with_no_bucket_left_the_body_runs_without_graphs() -> None:
    module = T2().eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[16, 32], request_slots=1, context_length=8, **TAPE)
    for n in (5, 8, 12):
        equal(packed(module, tokens(n), [n]), per_request(eager, tokens(n), [n]))
    report = fgc.report(module)
    only(report, Reason.NO_BUCKET, 3)
    assert all(word in report.details[Reason.NO_BUCKET] for word in ("context_length 8", "request_slots 1", "16"))


def test_b56_just_above_the_largest_bucket_and_back(t2: Pair) -> None:
    before = t2.report.fallbacks
    for poison in DRESSES:
        t2.dress(poison)
        for lengths, bucket in (([33], None), ([32], 32), ([30, 3], None), ([2, 30], 32), ([33], None)):
            t2.same(lengths, bucket=bucket)
    assert t2.report.fallbacks - before == {Reason.OVER_LADDER: 3 * len(DRESSES)}


def test_b60_a_graph_that_would_be_mostly_padding_is_not_replayed() -> None:
    made = pair(T2(), buckets=[8, 128], first=[70])
    assert Options().max_padding == 2.0
    made.same([9])
    made.same([63])
    assert made.report.fallbacks == {Reason.PADDING: 2}
    made.same([64], bucket=128)
    made.same([7], bucket=8)
    loose = pair(T2(), buckets=[8, 128], max_padding=float("inf"), first=[70])
    loose.same([9], bucket=128)


def test_b61_a_bucket_never_meets_a_collective_that_it_does_not_fit() -> None:
    """There is no alignment to set: an op that deals rows out to ranks is not captured, so it gets real rows only.

    With an option for it, each padded count would have to be one that the op takes.
    """

    class Scattered(T2):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            x = self.layers[0](self.embed(input_ids) + self.place(position_ids))
            return self.norm(self.layers[1](torch.ops.fgc_reports.reduce_scatter(x)))

    module = Scattered().eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[6, 8, 10], **TAPE)
    for n in (8, 4, 12):
        ids = tokens(n)
        want = per_request(eager, ids, [n])
        with seen_by("reduce_scatter") as seen:
            equal(packed(module, ids, [n]), want)
        assert [t.shape[1] for t in seen] == [n]
    report = fgc.report(module)
    only(report, Reason.UNPROVEN, 3)
    assert "reduce_scatter" in report.details[Reason.UNPROVEN]
    with pytest.raises(ValueError, match="unknown option 'alignment'"):
        Options.parse({"alignment": 4})


def test_b62_a_batch_of_max_tokens_replays() -> None:
    made = pair(T2(), max_tokens=70)
    assert made.report.buckets == (8, 16, 32, 64, 70)
    made.same([70], bucket=70)
    made.same([6] * 11 + [2, 1], bucket=70)


# -- tiny batches ------------------------------------------------------------------------------------------------------


def test_b57_a_batch_without_tokens_gives_no_rows(t2: Pair) -> None:
    before = t2.report.fallbacks
    for poison in DRESSES:
        t2.dress(poison)
        for lengths in ([0], [0, 0, 0]):
            assert t2.same(lengths).shape == (0, 32)
            assert fgc.PrefillBatch(lengths, device="cpu").last_token_rows.shape == (0,)
            t2.same([5, 0, 2], bucket=8)
    assert t2.report.fallbacks - before == {Reason.EMPTY: 2 * len(DRESSES)}
    with pytest.raises(ValueError, match="holds no request"):
        fgc.PrefillBatch([])


@pytest.mark.parametrize("lengths", [[0], [0, 0]])
def test_b57_a_first_call_without_tokens_is_no_error(lengths: list[int]) -> None:
    module = T2().eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[8], **TAPE)
    assert packed(module, tokens(0), lengths).shape == (0, 32)
    equal(packed(module, tokens(5), [2, 3]), per_request(eager, tokens(5), [2, 3]))
    assert fgc.report(module).replays == {8: 1}


@pytest.mark.parametrize("order", [(1, 2, 5, 0, 1), (0, 5, 1, 2)])
def test_b57_b59_a_causal_lm_is_compiled_once_for_any_order_of_counts(order: tuple[int, ...]) -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    fgc.compile(model, buckets=[8], **TAPE)
    for n in order:
        got = one_call(model, n, seed=n, use_cache=False).logits
        assert got.shape == (1, n, 97)
        if n:
            equal(got, one_call(eager, n, seed=n, use_cache=False).logits)
    report = fgc.report(model)
    assert report.compiles == 1
    assert report.replays == {8: sum(n > 0 for n in order)}
    assert report.fallbacks == {Reason.EMPTY: sum(n == 0 for n in order)}


@pytest.mark.parametrize("order", [(1, 2, 5, 1), (5, 1, 2)])
def test_b59_a_module_with_torch_attention_is_compiled_once_for_any_order_of_counts(order: tuple[int, ...]) -> None:
    module = T2().eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[8], **TAPE)
    for n in order:
        equal(packed(module, tokens(n), [n]), per_request(eager, tokens(n), [n]))
    report = fgc.report(module)
    assert report.compiles == 1
    assert report.replays == {8: len(order)}


def test_b59_a_first_call_of_one_token_can_be_explained() -> None:
    module = T2().eval()
    fgc.compile(module, buckets=[8], **TAPE)
    call = {"input_ids": tokens(1)[None], "position_ids": torch.arange(1)[None]}
    for _ in range(2):
        with torch.inference_mode():
            before = fgc.report(module).replays
            said = fgc.decision(module, **call)
            module(**call)
            assert (said.route is fgc.Route.GRAPH) == (fgc.report(module).replays != before)


def test_b58_a_prompt_of_one_token_replays_like_any_other(t2: Pair) -> None:
    """The batch's kind is never guessed: there is one kind of graph, and the decision sees counts only."""
    for poison in DRESSES:
        t2.dress(poison)
        for lengths in ([1], [4], [1, 1], [1], [1, 1, 1, 1]):
            t2.same(lengths, bucket=4)


def test_b58_a_fresh_prompt_of_one_token_starts_without_state() -> None:
    module = Recurrent().eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[4], **TAPE)
    calls: list[tuple[list[int], list[float]]] = [
        ([1, 1, 2], [1, 1, 1]),
        ([1], [1]),  # a fresh prompt alone
        ([3, 1], [1, 0]),  # a fresh one beside one that goes on
        ([3], [0]),
        ([3], [1]),
    ]
    for i, (slots, fresh) in enumerate(calls):
        more = {"slots": torch.tensor(slots), "fresh": torch.tensor(fresh)}
        equal(*(one_call(m, len(slots), seed=i, **more) for m in (module, eager)))
        equal(module.state, eager.state)
    assert not fgc.report(module).replays


class EveryOther(T2):
    """A mask that attention cannot be told of: each row sees every second row before it."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        rows = torch.arange(x.shape[1], device=x.device)
        back = rows[:, None] - rows
        for layer in self.layers:
            q, k, v = layer.qkv(layer.norm1(x)).unflatten(-1, (3, layer.heads, -1)).transpose(1, 3).unbind(2)
            a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back % 2 == 0))
            x = x + layer.out(a.transpose(1, 2).flatten(2))
        return self.norm(x)


@pytest.mark.parametrize("way", ["fgc.compile", "torch.compile"])
def test_b37_a_graph_that_is_not_captured_takes_no_batch_for_one_request(way: str) -> None:
    """The model's own attention runs there, for which all tokens are one request."""
    plain = either_way(EveryOther(), way, buckets=(8,))
    for lengths in ([5], [7], [3, 4], [5], [8, 9]):
        ids = tokens(sum(lengths))
        want = per_request(plain.eager, ids, lengths)
        if len(lengths) == 1:
            equal(packed(plain.body, ids, lengths), want)
            continue
        try:
            got = packed(plain.body, ids, lengths)
        except (ValueError, fgc.FallbackError) as refusal:
            assert "2 requests" in str(refusal)
        else:
            equal(got, want)
    with pytest.raises((ValueError, fgc.FallbackError), match="PrefillBatch"):
        packed(plain.body, tokens(7), [4, 5])
    assert not plain.report.replays
    assert Reason.UNMARKED in plain.report.fallbacks


# -- what is said ------------------------------------------------------------------------------------------------------


def test_b63_each_fallback_is_counted_and_each_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module = T2().eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[8, 16], request_slots=3, attention="watched", **TAPE)
    with caplog.at_level(logging.WARNING, "fullgraph_compile"):
        for lengths in ([5], [17], [2] * 4, [0], [18], [1] * 5, [12], [0]):
            equal(packed(module, tokens(sum(lengths)), lengths), per_request(eager, tokens(sum(lengths)), lengths))
    report = fgc.report(module)
    assert report.fallbacks == {Reason.OVER_LADDER: 2, Reason.OVER_SLOTS: 2, Reason.EMPTY: 2}
    said = [r.getMessage() for r in caplog.records]
    for reason in report.fallbacks:
        assert len([text for text in said if reason.value in text]) == 1
    assert len(said) == 3
    assert report.buckets == (8, 16)
    assert report.replays == {8: 1, 16: 1}
    text = str(report)
    assert all(reason.value in text for reason in report.fallbacks)


def test_b63_strict_raises_and_the_next_call_is_right() -> None:
    made = pair(T2(), buckets=[8], strict=True)
    for lengths, reason in (([9], Reason.OVER_LADDER), ([0], Reason.EMPTY), ([1] * 9, Reason.OVER_LADDER)):
        with pytest.raises(FallbackError, match=reason.value):
            packed(made.body, tokens(sum(lengths)), lengths)
        made.same([3, 4], bucket=8)
    assert made.report.fallbacks == {Reason.OVER_LADDER: 2, Reason.EMPTY: 1}
