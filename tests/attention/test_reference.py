"""The reference against an oracle that loops over requests, heads and queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fullgraph_compile.attention.reference as reference
from fullgraph_compile.attention import create_attention
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import (
    BATCHES,
    FEATURES,
    SITE,
    Inputs,
    dropped,
    expected,
    inputs_for,
    poison_tail,
    static_batch,
)

BACKEND = ReferenceAttention()
NAN, INF = float("nan"), float("inf")


def run(site: AttentionSite, inputs, static):
    return BACKEND.run(*inputs.tensors(), site, static)


def check(site: AttentionSite, q_lens: list[int], k_lens: list[int], *, padding: int = 0, poison: float = 0.0) -> None:
    q_rows, k_rows = sum(q_lens), sum(k_lens)
    inputs = inputs_for(site, q_rows + padding, k_rows + padding)
    want = expected(site, inputs, q_lens, k_lens)
    poison_tail(inputs, q_rows, k_rows, poison)
    got = run(site, inputs, static_batch(q_lens, k_lens, tokens=q_rows + padding, slots=len(q_lens) + min(padding, 3)))
    assert got.shape == (q_rows + padding, site.heads, site.value_head_size) and got.is_contiguous()
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    assert (got[q_rows:] == 0).all()


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("batch", BATCHES)
def test_each_feature_equals_the_oracle(feature: str, batch: str) -> None:
    check(FEATURES[feature][0], *BATCHES[batch])


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("poison", [NAN, INF, 1e38])
def test_each_feature_ignores_what_padded_rows_hold(feature: str, poison: float) -> None:
    check(FEATURES[feature][0], [3, 0, 6], [5, 2, 6], padding=7, poison=poison)


@pytest.mark.parametrize("feature", FEATURES)
def test_without_the_feature_the_answer_is_another(feature: str) -> None:
    site, without = FEATURES[feature]
    q_lens, k_lens = BATCHES["prefixes"]
    inputs = inputs_for(site, sum(q_lens), sum(k_lens))
    fewer = dropped(inputs, without)
    difference = expected(site, inputs, q_lens, k_lens) - expected(without, fewer, q_lens, k_lens)
    assert difference.abs().max() > 1e-2


def test_a_window_counts_keys_besides_the_query_itself() -> None:
    site = replace(SITE, left=1, right=0)
    inputs = inputs_for(site, 6, 6)
    before = run(site, inputs, static_batch([6]))
    inputs.v[2] += 1
    changed = (run(site, inputs, static_batch([6])) - before).abs().amax((1, 2)) > 1e-6
    assert changed.tolist() == [False, False, True, True, False, False]


def test_a_cap_comes_before_the_slopes() -> None:
    site = replace(SITE, softcap=0.5, slopes=True)
    inputs = inputs_for(site, 9, 9)
    want = expected(site, inputs, [9], [9])
    torch.testing.assert_close(run(site, inputs, static_batch([9])).double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_come_back_in_their_own_with_no_error_but_the_last_rounding(
    feature: str, dtype: torch.dtype
) -> None:
    site = replace(FEATURES[feature][0], dtype=dtype)
    inputs = inputs_for(site, 24, 30)
    got = run(site, inputs, static_batch([5, 19], [9, 21]))
    assert got.dtype is dtype
    want = expected(site, inputs, [5, 19], [9, 21])
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, atol=max(1e-12, step / 1000), rtol=max(1e-12, step))


@pytest.mark.parametrize("sink", [-200.0, 0.0, 30.0, 200.0])
def test_a_sink_of_any_size(sink: float) -> None:
    site = replace(SITE, sinks=True)
    inputs = replace(inputs_for(site, 9, 9), sinks=torch.full((site.heads,), sink))
    want = expected(site, inputs, [4, 5], [4, 5])
    torch.testing.assert_close(run(site, inputs, static_batch([4, 5])).double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", ["causal", "two-sided window", "sinks"])
def test_long_requests_after_each_other(feature: str) -> None:
    # Long enough that whole tiles of keys are unseen by a row, before and behind what it sees.
    site = replace(FEATURES[feature][0], heads=2, kv_heads=1)
    lens = [700, 900, 600]
    inputs = inputs_for(site, 2300, 2200)
    got = run(site, inputs, static_batch(lens, tokens=2300, slots=6))
    start = 0
    for n in lens:
        rows = slice(start, start + n)
        alone = Inputs(inputs.q[rows], inputs.k[rows], inputs.v[rows], inputs.sinks, inputs.slopes)
        torch.testing.assert_close(got[rows], run(site, alone, static_batch([n])), atol=1e-5, rtol=1e-5)
        some = [0, 1, n // 2, n - 1]
        q, k, v = (t.double() for t in (alone.q, alone.k[:, 0], alone.v[:, 0]))
        for i in some:
            low, high = (0 if site.left < 0 else max(0, i - site.left)), (n if site.right < 0 else i + site.right + 1)
            scores = q[i] @ k[low:high].T * site.scale
            if site.sinks:
                scores = torch.cat([scores, inputs.sinks.double()[:, None]], dim=1)
            weights = scores.softmax(-1)[:, : len(k[low:high])]
            torch.testing.assert_close(got[start + i].double(), weights @ v[low:high], atol=1e-5, rtol=1e-5)
        start += n
    assert (got[2200:] == 0).all()


@pytest.mark.parametrize("feature", ["causal", "soft cap"])
@pytest.mark.parametrize("broken", ["k", "v"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_broken_request_breaks_no_other(feature: str, broken: str, value: float) -> None:
    site = FEATURES[feature][0]
    inputs = inputs_for(site, 12, 12)
    clean = expected(site, inputs, [4, 5, 3], [4, 5, 3])
    getattr(inputs, broken)[6, 1] = value  # key 2 of the second request, one head
    got = run(site, inputs, static_batch([4, 5, 3]))
    sees = torch.zeros(12, site.heads, dtype=torch.bool)
    sees[6:9, 1] = True  # the queries at and after it
    assert got[sees].isnan().all()
    torch.testing.assert_close(got[~sees].double(), clean[~sees], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", ["causal", "all at once"])
def test_many_blocks_of_rows_equal_one(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SCORES", 4 * 20 * 3)
    check(FEATURES[feature][0], [5, 9, 6], [5, 9, 6], padding=3, poison=NAN)


@pytest.mark.parametrize("feature", ["causal", "GQA", "two-sided window"])
def test_the_fused_and_the_explicit_way_agree(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = FEATURES[feature][0]
    inputs = inputs_for(site, 20, 30)
    static = static_batch([5, 9, 3], [15, 9, 4], tokens=20, slots=6)
    fused = run(site, inputs, static)
    monkeypatch.setattr(
        reference, "_fused", lambda q, k, v, scale, seen: reference._explicit(q, k, v, None, None, scale, 0.0, seen)
    )
    torch.testing.assert_close(run(site, inputs, static), fused, atol=1e-5, rtol=1e-5)


def test_a_transposed_query_is_read_by_its_strides() -> None:
    inputs = inputs_for(SITE, 8, 8)
    strided = replace(inputs, **{n: getattr(inputs, n).transpose(0, 1).contiguous().transpose(0, 1) for n in "qkv"})
    got = run(SITE, strided, static_batch([8]))
    assert got.is_contiguous()
    torch.testing.assert_close(got, run(SITE, inputs, static_batch([8])), atol=1e-6, rtol=1e-6)


class _HostReads(TorchDispatchMode):
    """Refuses what a graph could not replay."""

    refused = ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "repeat_interleave")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.refused, f"{name} reads a value on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_read_on_the_host(feature: str, mode: type) -> None:
    site = FEATURES[feature][0]
    inputs, static = inputs_for(site, 16, 16), static_batch([5, 4], tokens=16, slots=4)
    with mode(), _HostReads():
        run(site, inputs, static)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 6)), min_size=1, max_size=5),
    left=st.integers(-1, 4),
    right=st.integers(-1, 3),
    padding=st.integers(0, 5),
    slots=st.integers(0, 3),
    capped=st.booleans(),
)
def test_any_batch_in_any_bucket(
    lens: list[tuple[int, int]], left: int, right: int, padding: int, slots: int, capped: bool
) -> None:
    q_lens, k_lens = [n for n, _ in lens], [n + c for n, c in lens]
    site = replace(
        SITE,
        heads=2,
        kv_heads=1,
        head_size=8,
        value_head_size=8,
        left=left,
        right=right,
        softcap=1.5 if capped else 0.0,
    )
    q_rows, k_rows = sum(q_lens), sum(k_lens)
    inputs = inputs_for(site, q_rows + padding, k_rows)
    want = expected(site, inputs, q_lens, k_lens)
    poison_tail(inputs, q_rows, k_rows, NAN)
    got = run(site, inputs, static_batch(q_lens, k_lens, tokens=q_rows + padding, slots=len(lens) + slots))
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


# -- reported faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_b02_rows_past_the_last_offset_are_zero(feature: str) -> None:
    site = FEATURES[feature][0]
    inputs = inputs_for(site, 16, 16)
    want = expected(site, inputs, [5], [5])
    poison_tail(inputs, 5, 5, NAN)
    static = static_batch([5], tokens=16, slots=4)
    assert static.cu_q.tolist() == [0, 5, 5, 5, 5]
    # The allocator gives the next output the bytes of the last one.
    torch.full((16, site.heads, site.value_head_size), NAN)
    got = run(site, inputs, static)
    torch.testing.assert_close(got[:5].double(), want[:5], atol=1e-5, rtol=1e-5)
    assert (got[5:] == 0).all()


@pytest.mark.parametrize("feature", ["causal", "two-sided", "soft cap", "sinks"])
def test_b10_an_empty_key_range_gives_zeros_and_tiles_that_share_a_scale_stay_right(feature: str) -> None:
    site = FEATURES[feature][0]

    def quantised(rows: torch.Tensor) -> torch.Tensor:
        tiles = rows.flatten(1).unflatten(0, (-1, 4))
        scale = tiles.abs().amax((1, 2), keepdim=True).clamp(min=1e-6) / 127
        return ((tiles / scale).round() * scale).flatten(0, 1)

    inputs = inputs_for(site, 8, 8)
    want = quantised(expected(site, inputs, [4, 2], [4, 0])[:8].float())
    poison_tail(inputs, 6, 4, NAN)
    got = quantised(run(site, inputs, static_batch([4, 2], [4, 0], tokens=8, slots=4)))
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
    assert (got[4:] == 0).all()


@pytest.mark.parametrize("feature", ["causal", "GQA", "soft cap"])
def test_b18_zero_lengths_at_large_head_sizes(feature: str) -> None:
    for size in (64, 128, 256):
        check(replace(FEATURES[feature][0], head_size=size, value_head_size=size), [0, 3, 2, 0], [4, 5, 2, 6])


@pytest.mark.parametrize("feature", FEATURES)
def test_b26_a_batch_without_real_tokens_gives_zeros(feature: str) -> None:
    site = FEATURES[feature][0]
    inputs = inputs_for(site, 8, 8)
    poison_tail(inputs, 0, 0, NAN)
    got = run(site, inputs, static_batch([], tokens=8, slots=4))
    assert got.shape == (8, site.heads, site.value_head_size) and (got == 0).all()
    none = run(site, inputs_for(site, 0, 0), static_batch([0]))
    assert none.shape == (0, site.heads, site.value_head_size)


def test_b26_the_op_has_one_output_so_no_log_sum_exp_can_be_missing() -> None:
    assert len(torch.ops.full_prefill.attention.default._schema.returns) == 1


def test_b44_the_last_query_sees_all_keys_of_its_request() -> None:
    q_lens, k_lens = [3, 3], [13, 3]
    inputs = inputs_for(SITE, 6, 16)
    got = run(SITE, inputs, static_batch(q_lens, k_lens, tokens=6, slots=4))

    # Query i of a request sees keys 0 ... k_len - q_len + i.
    mask = torch.zeros(6, 16, dtype=torch.bool)
    for row, (start, count) in enumerate([(0, 11), (0, 12), (0, 13), (13, 1), (13, 2), (13, 3)]):
        mask[row, start : start + count] = True
    q, k, v = (t.transpose(0, 1)[None] for t in (inputs.q, inputs.k, inputs.v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SITE.scale)[0].transpose(
        0, 1
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

    seen = inputs.v.clone()
    for key in range(13):
        replaced = replace(inputs, v=seen.clone())
        replaced.v[key] += 1
        assert (run(SITE, replaced, static_batch(q_lens, k_lens)) - got)[2].abs().max() > 1e-6, f"key {key} is unseen"


def test_auto_takes_the_reference_on_a_cpu() -> None:
    assert isinstance(create_attention("auto", [SITE], torch.device("cpu")), ReferenceAttention)
