"""What FlashAttention inside torch says that it cannot do, and how it is called; its numbers need a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fullgraph_compile.attention import UnsupportedAttention, create_attention, varlen
from fullgraph_compile.attention.triton import TritonAttention
from fullgraph_compile.attention.varlen import VarlenAttention
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import SITE, inputs_for, static_batch

HALF = replace(SITE, dtype=torch.bfloat16)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, as far as is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


REASONS: dict[str, tuple[AttentionSite, str]] = {
    "fp32": (SITE, "dtype is torch.float32; it computes in float16 and bfloat16 only"),
    "value head size": (
        replace(HALF, value_head_size=8),
        "key head size 16 and value head size 8 differ; it needs equal ones",
    ),
    "large head size": (replace(HALF, head_size=264, value_head_size=264), "head size 264 is above 256"),
    "odd head size": (replace(HALF, head_size=20, value_head_size=20), "head size 20 is no multiple of 8"),
    "groups": (replace(HALF, kv_heads=3), "4 query heads are no multiple of 3 key heads"),
    "soft cap": (replace(HALF, softcap=50.0), "it has no soft cap, the site has one of 50"),
    "sinks": (replace(HALF, sinks=True), "it has no attention sinks, the site has them"),
    "slopes": (replace(HALF, slopes=True), "it has no ALiBi slopes, the site has them"),
}


@pytest.mark.parametrize("what", REASONS)
def test_what_it_cannot_do_is_said_in_words(what: str, hopper: None) -> None:
    site, reason = REASONS[what]
    assert VarlenAttention().supports(site, CUDA) == [reason]


def test_all_reasons_are_given_at_once(hopper: None) -> None:
    assert len(VarlenAttention().supports(replace(SITE, sinks=True, softcap=1.0), CUDA)) == 3


@pytest.mark.parametrize(
    "site",
    [
        HALF,
        replace(HALF, dtype=torch.float16, kv_heads=2, head_size=256, value_head_size=256),
        replace(HALF, kv_heads=1, left=3),
        replace(HALF, right=-1),
        replace(HALF, left=2, right=1),
    ],
)
def test_what_it_can_do_has_no_reason_against_it(
    site: AttentionSite, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert VarlenAttention().supports(site, CUDA) == []
    # What "auto" takes before it, where Triton is installed.
    monkeypatch.setattr(TritonAttention, "supports", lambda *args: ["not here"])
    assert isinstance(create_attention("auto", [site], CUDA), VarlenAttention)


def test_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedAttention, match=r"varlen cannot serve .*the device is cpu; it runs on CUDA only"):
        create_attention("varlen", [HALF], torch.device("cpu"))


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m.setattr(torch.cuda, "get_device_capability", lambda d=None: (7, 5)), "compute capability 7.5"),
        (lambda m: m.setattr(torch.cuda, "is_available", lambda: False), "there is no CUDA device"),
        (lambda m: m.setattr(torch.version, "hip", "6.0"), "on ROCm"),
        (lambda m: m.setattr(varlen, "flash_attention", None), "no aten::_flash_attention_forward"),
        (lambda m: m.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False), "built without"),
    ],
)
def test_a_machine_that_cannot_is_refused(
    change: Any, reason: str, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    (said,) = VarlenAttention().supports(HALF, CUDA)
    assert reason in said


@pytest.mark.parametrize(("left", "causal"), [(5, False), (-1, True)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_kernel_gets_the_request_of_padded_rows_and_fixed_bounds(
    left: int, causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple, dict]] = []

    def kernel(*args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        calls.append((args, kwargs))
        return (torch.empty_like(args[0]),)

    monkeypatch.setattr(varlen, "flash_attention", kernel)
    site = replace(HALF, kv_heads=kv_heads, left=left, right=0)
    inputs = inputs_for(site, 8, 8)
    q = inputs.q.transpose(0, 1).contiguous().transpose(0, 1)
    static = static_batch([2, 1], tokens=8, slots=4, max_k=64)
    out = VarlenAttention().run(q, inputs.k, inputs.v, None, None, site, static)
    assert out.is_contiguous()
    ((query, key, value, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug), options) = calls[0]
    assert query is q and key is inputs.k and value is inputs.v  # nothing is repeated or copied
    assert cu_q is static.pad_cu_q and cu_k is static.pad_cu_k
    assert (cu_q.tolist(), cu_k.tolist()) == ([0, 2, 3, 3, 3, 8], [0, 2, 3, 3, 3, 3])
    assert (max_q, max_k) == (8, 64)
    assert (dropout, is_causal, debug) == (0.0, causal, False)
    assert options == {"scale": site.scale, "window_size_left": left, "window_size_right": 0}


def test_the_bound_of_queries_is_never_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[int] = []
    monkeypatch.setattr(varlen, "flash_attention", lambda *a, **k: bounds.append(a[5]) or (torch.empty_like(a[0]),))
    inputs = inputs_for(HALF, 1, 1)
    VarlenAttention().run(*inputs.tensors(), HALF, replace(static_batch([1]), max_q=1))
    assert bounds == [2]


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "flash_attention", None)
    inputs = inputs_for(HALF, 0, 0)
    assert VarlenAttention().run(*inputs.tensors(), HALF, static_batch([0])).shape == (0, 4, 16)
