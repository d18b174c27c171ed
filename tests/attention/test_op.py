"""The op outside of a compiled body: what it computes, and that its fake tells the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fullgraph_compile.attention  # noqa: F401  registers what the op computes
from fullgraph_compile import ops
from fullgraph_compile.batch import PrefillBatch
from tests.attention.cases import BATCHES, FEATURES, SITE, Inputs, expected, inputs_for


def call(site: ops.AttentionSite, inputs: Inputs) -> Tensor:
    return ops.attention(*inputs.tensors(), site.scale, site.left, site.right, site.softcap, -1)


@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_batch_all_rows_are_one_request(feature: str) -> None:
    site = FEATURES[feature][0]
    inputs = inputs_for(site, 9, 9)
    torch.testing.assert_close(call(site, inputs).double(), expected(site, inputs, [9], [9]), atol=1e-5, rtol=1e-5)


def test_without_a_batch_more_keys_than_queries_are_one_prefix() -> None:
    inputs = inputs_for(SITE, 3, 13)
    torch.testing.assert_close(call(SITE, inputs).double(), expected(SITE, inputs, [3], [13]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", FEATURES)
def test_inside_a_batch_rows_belong_to_its_requests(feature: str) -> None:
    site = FEATURES[feature][0]
    q_lens, _ = BATCHES["packed"]
    inputs = inputs_for(site, sum(q_lens), sum(q_lens))
    with PrefillBatch(q_lens, device="cpu"):
        got = call(site, inputs)
    torch.testing.assert_close(got.double(), expected(site, inputs, q_lens, q_lens), atol=1e-5, rtol=1e-5)
    if site.left != 0 or site.right != 0:  # one that sees only itself is the same in any request
        assert (got - call(site, inputs)).abs().max() > 1e-3


def test_a_batch_of_other_lengths_is_an_error_that_says_both() -> None:
    with PrefillBatch([4, 3], device="cpu"), pytest.raises(ValueError, match=r"9 query rows .* has 7 new"):
        call(SITE, inputs_for(SITE, 9, 9))
    call(SITE, inputs_for(SITE, 9, 9))


def test_a_batch_without_tokens_gives_no_rows() -> None:
    with PrefillBatch([0, 0], device="cpu"):
        assert call(SITE, inputs_for(SITE, 0, 0)).shape == (0, SITE.heads, SITE.value_head_size)


@pytest.mark.parametrize("qk, value", [(8, 8), (12, 8), (8, 16)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_b45_the_shape_rule_is_that_of_the_real_op(qk: int, value: int, tokens: int) -> None:
    site = replace(SITE, head_size=qk, value_head_size=value, kv_heads=2)
    inputs = inputs_for(site, tokens, tokens)
    real = call(site, inputs)
    assert real.shape == (tokens, site.heads, value)
    with FakeTensorMode() as mode:
        fake = call(site, Inputs(*(None if t is None else mode.from_tensor(t) for t in inputs.tensors())))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    torch.testing.assert_close(real.double(), expected(site, inputs, [tokens], [tokens]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", ["causal", "GQA", "all at once", "smaller value heads"])
def test_b46_fake_and_real_agree_for_a_transposed_query(feature: str) -> None:
    site = FEATURES[feature][0]
    inputs = inputs_for(site, 6, 6)
    inputs = replace(inputs, **{n: getattr(inputs, n).transpose(0, 1).contiguous().transpose(0, 1) for n in "qkv"})
    assert not inputs.q.is_contiguous()
    real = call(site, inputs)
    with FakeTensorMode() as mode:
        fake = call(site, Inputs(*(None if t is None else mode.from_tensor(t) for t in inputs.tensors())))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.storage_offset() == real.storage_offset() == 0


@pytest.mark.parametrize("feature", ["causal", "GQA", "all at once", "larger value heads"])
@pytest.mark.parametrize("strided", [False, True])
def test_b46_torchs_own_check_of_the_op_passes_with_dynamic_shapes(feature: str, strided: bool) -> None:
    site = FEATURES[feature][0]
    inputs = inputs_for(site, 6, 6)
    if strided:
        inputs = replace(inputs, q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1))
    args = (*inputs.tensors(), site.scale, site.left, site.right, site.softcap, -1)
    torch.library.opcheck(
        ops.attention, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


def test_the_op_changes_none_of_its_arguments() -> None:
    site = FEATURES["all at once"][0]
    inputs = inputs_for(site, 7, 7)
    before = [t.clone() for t in inputs.tensors() if t is not None]
    call(site, inputs)
    for tensor, copy in zip((t for t in inputs.tensors() if t is not None), before, strict=True):
        assert torch.equal(tensor, copy)
