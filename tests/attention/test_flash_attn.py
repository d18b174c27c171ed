"""FlashAttention from its own packages: what each refuses and how it is called; its numbers need a GPU."""

from __future__ import annotations

import gc
import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fullgraph_compile.attention import create_attention, flash_libraries
from fullgraph_compile.attention.flash_attn import FlashAttnBackend
from fullgraph_compile.attention.flash_libraries import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
)
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import SITE, inputs_for, static_batch
from tests.attention.replaying import host_batch, in_pages

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HALF = replace(
    SITE, index=1, dtype=torch.bfloat16, heads=8, kv_heads=2, head_size=128, value_head_size=128, scale=128**-0.5
)  # fmt: skip


class Fa2(FlashAttnBackend):
    libraries = (FlashAttention2,)


class Fa4(FlashAttnBackend):
    libraries = (FlashAttention4,)


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and all packages, as far as is asked; fa3-fwd as it is on the package index."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flash_libraries, "_absent", lambda package, module: "")
    built(monkeypatch, PAGEDKV=True, LOCAL=True, FP16=True, SOFTCAP=False, VARLEN=False)


def built(monkeypatch: pytest.MonkeyPatch, **left_out: bool) -> None:
    monkeypatch.setattr(FlashAttention3, "left_out", staticmethod(lambda: left_out))


REASONS: dict[str, tuple[type[FlashAttnBackend], AttentionSite, str]] = {
    "FA3 fp16": (
        FlashAttnBackend,
        replace(HALF, dtype=torch.float16),
        "dtype is torch.float16; it computes in bfloat16 only",
    ),
    "FA3 window": (FlashAttnBackend, replace(HALF, left=3), "it has no window, the site has a causal window of 4"),
    "FA3 value size": (
        FlashAttnBackend,
        replace(HALF, value_head_size=64),
        "key head size 128 and value head size 64 differ in a way that it does not know",
    ),
    "FA3 sinks": (FlashAttnBackend, replace(HALF, sinks=True), "it has no attention sinks, the site has them"),
    "FA3 slopes": (FlashAttnBackend, replace(HALF, slopes=True), "it has no ALiBi slopes, the site has them"),
    "large head size": (
        FlashAttnBackend,
        replace(HALF, head_size=264, value_head_size=264),
        "head size 264 is above 256",
    ),
    "odd head size": (
        FlashAttnBackend,
        replace(HALF, head_size=20, value_head_size=20),
        "head size 20 is no multiple of 8",
    ),
    "groups": (FlashAttnBackend, replace(HALF, kv_heads=3), "8 query heads are no multiple of 3 key heads"),
    "FA4 fp32": (
        Fa4,
        replace(HALF, dtype=torch.float32),
        "dtype is torch.float32; it computes in float16 and bfloat16 only",
    ),
    "FA4 sinks": (Fa4, replace(HALF, sinks=True), "it has no attention sinks, the site has them"),
    "FA2 sizes": (
        Fa2,
        replace(HALF, value_head_size=64),
        "key head size 128 and value head size 64 differ; it needs equal ones",
    ),
    "FA2 slopes": (
        Fa2,
        replace(HALF, slopes=True, right=-1),
        "it has ALiBi slopes for causal attention without a soft cap only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REASONS)
def test_what_it_cannot_do_is_said_in_words(what: str, hopper: None) -> None:
    backend, site, reason = REASONS[what]
    assert backend().supports(site, CUDA) == [reason]


@pytest.mark.parametrize(
    ("backend", "site"),
    [
        (FlashAttnBackend, HALF),
        (FlashAttnBackend, replace(HALF, right=-1, softcap=30.0, kv_heads=1)),
        (FlashAttnBackend, replace(HALF, head_size=192)),
        (Fa4, replace(HALF, dtype=torch.float16, left=4, right=2)),
        (Fa2, replace(HALF, slopes=True, left=4)),
    ],
)
def test_what_it_can_do_has_no_reason_against_it(
    backend: type[FlashAttnBackend], site: AttentionSite, hopper: None
) -> None:
    assert backend().supports(site, CUDA) == []
    if backend is FlashAttnBackend:
        assert type(create_attention("flash_attn", [site], CUDA)) is FlashAttnBackend


def test_a_build_with_everything_has_windows_fp16_and_pages(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch, PAGEDKV=False, LOCAL=False, FP16=False, SOFTCAP=False, VARLEN=False)
    assert FlashAttnBackend().supports(replace(HALF, dtype=torch.float16, left=3, right=2), CUDA) == []
    assert FlashAttnBackend().supports_pages(16, CUDA) == []


def test_what_a_build_left_out_is_read_from_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"FLASHATTENTION_DISABLE_LOCAL": False, "FLASHATTENTION_DISABLE_PAGEDKV": True}
    config = SimpleNamespace(CONFIG={"build_flags": flags})
    monkeypatch.setattr(flash_libraries.importlib, "import_module", lambda name: config)
    out = FlashAttention3.left_out()
    assert (out["LOCAL"], out["PAGEDKV"], out["FP16"], out["VARLEN"]) == (False, True, True, False)


@pytest.mark.parametrize(
    ("backend", "page_size", "reason"),
    [
        (FlashAttnBackend, 16, "fa3-fwd was built without paged KV"),
        (Fa2, 16, "flash-attn reads pages of a multiple of 256 tokens, these have 16"),
        (Fa2, 512, ""),
        (Fa4, 128, "FA4 may load pages of 128 tokens whole, past a request's keys, where a NaN"),
        (Fa4, 16, ""),
    ],
)
def test_pages_that_cannot_be_read_are_refused_in_words(
    backend: type[FlashAttnBackend], page_size: int, reason: str, hopper: None
) -> None:
    said = backend().supports_pages(page_size, CUDA)
    assert bool(said) == bool(reason) and reason in " ".join(said)


def test_devices_and_absent_packages_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FlashAttnBackend().supports(HALF, CPU) == ["the device is cpu; it runs on CUDA only"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    packages = {"fa3-fwd": "", "flash-attn-4": "the package flash-attn-4 is not installed", "flash-attn": ""}
    monkeypatch.setattr(flash_libraries, "_absent", lambda package, module: packages[package])
    assert isinstance(FlashAttnBackend()._choose(CUDA), FlashAttention2), "FA3 does not run there"
    packages["flash-attn"] = "flash-attn cannot be imported: ImportError: undefined symbol"
    assert FlashAttnBackend().supports(HALF, CUDA) == [
        "fa3-fwd does not run on compute capability 8.6",
        "the package flash-attn-4 is not installed",
        "flash-attn cannot be imported: ImportError: undefined symbol",
    ]


def test_a_package_is_absent_broken_or_there(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = flash_libraries._absent.__wrapped__
    assert absent("nothing", "no_such_package.inner") == "the package nothing is not installed"
    assert absent("json", "json.decoder") == ""

    def broken(name: str) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert absent("json", "json") == "json cannot be imported: OSError: libcudart.so.12: cannot open shared object file"


# -- how it is called --------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the packages' functions get; they answer with NaN."""
    seen: list[dict[str, Any]] = []

    def fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        seen.append({"q": q, "k": k, "v": v, **options})
        return torch.full_like(q, float("nan")), q, q, q

    def varlen(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        return fwd(q, k, v, args=args, **options)[0]

    def load(name: str) -> Any:
        return SimpleNamespace(flash_attn_varlen_func=varlen)

    monkeypatch.setattr(FlashAttnBackend, "_choose", lambda self, device: self.libraries[0]())
    monkeypatch.setattr(torch.ops, "fa3_fwd", SimpleNamespace(fwd=fwd), raising=False)
    monkeypatch.setattr(flash_libraries.importlib, "import_module", load)
    return seen


def called(backend: FlashAttnBackend, site: AttentionSite, page_size: int = 0) -> tuple[Any, Any, Tensor]:
    static = static_batch([2, 1], [9, 1] if page_size else None, tokens=8, slots=4, max_k=64)
    inputs = inputs_for(site, 8, 10)
    inputs = replace(inputs, k=inputs.k[:8], v=inputs.v[:8].clone())
    if page_size:
        static = in_pages(static, inputs_for(site, 8, 10), [9, 1], page_size)
    inputs.v[3:] = float("nan")
    backend.plan(host_batch([2, 1], [9, 1] if page_size else None), static, (site,))
    return inputs, static, backend.run(*inputs.tensors(), site, static)


@pytest.mark.parametrize("right", [0, -1])
def test_fa3_gets_the_request_of_padded_rows_and_fixed_bounds(right: int, calls: list[dict[str, Any]]) -> None:
    inputs, static, out = called(FlashAttnBackend(), replace(HALF, right=right, softcap=5.0))
    (got,) = calls
    assert got["q"] is inputs.q and got["k"] is inputs.k
    assert got["cu_seqlens_q"] is static.pad_cu_q and got["cu_seqlens_k"] is static.pad_cu_k
    assert (got["max_seqlen_q"], got["max_seqlen_k"], got["num_splits"]) == (8, 64, 1)
    assert (got["is_causal"], got["window_size_left"], got["window_size_right"]) == (right == 0, -1, right)
    assert (got["softmax_scale"], got["softcap"]) == (HALF.scale, 5.0)
    # It loads whole tiles of V: 0 * NaN would be NaN.
    assert torch.equal(got["v"][:3], inputs.v[:3]) and (got["v"][3:] == 0).all()
    assert out.is_contiguous() and out.shape == (8, 8, 128)


def test_fa2_gets_the_request_of_padded_rows_or_pages_and_zeros(calls: list[dict[str, Any]]) -> None:
    inputs, static, _ = called(Fa2(), replace(HALF, left=3))
    assert calls[0]["args"] == (static.pad_cu_q, static.pad_cu_k, 8, 64)
    assert calls[0]["v"] is inputs.v and calls[0]["window_size"] == (3, 0) and calls[0]["causal"] is False
    _, static, out = called(Fa2(), HALF, page_size=256)
    got = calls[1]
    assert got["k"] is static.cache.k[1] and got["block_table"] is static.page_table and got["causal"] is True
    assert got["args"] == (static.cu_q, static.cu_k, 8, 64)
    assert out[:3].isnan().all() and (out[3:] == 0).all()


def test_fa4_reads_used_lengths_of_pages_and_its_padded_rows_are_zeroed(calls: list[dict[str, Any]]) -> None:
    _, static, out = called(Fa4(), replace(HALF, left=3, right=1))
    assert calls[0]["cu_seqlens_k"] is static.cu_k and calls[0]["window_size"] == (3, 1)
    assert (out[3:] == 0).all() and (calls[0]["v"][3:] == 0).all()
    _, static, out = called(Fa4(), HALF, page_size=16)
    got = calls[1]
    assert got["page_table"] is static.page_table and got["seqused_k"] is static.k_lens and "cu_seqlens_k" not in got
    assert (got["causal"], got["window_size"], got["max_seqlen_q"]) == (True, (None, None), 8)
    assert out[:3].isnan().all() and (out[3:] == 0).all()


@pytest.mark.parametrize("kind", [FlashAttnBackend, Fa2, Fa4])
def test_the_bound_of_queries_is_never_one(kind: type[FlashAttnBackend], calls: list[dict[str, Any]]) -> None:
    backend, inputs, static = kind(), inputs_for(HALF, 1, 1), replace(static_batch([1]), max_q=1)
    backend.plan(host_batch([1]), static, (HALF,))
    backend.run(*inputs.tensors(), HALF, static)
    assert 2 in (calls[0].get("max_seqlen_q"), *calls[0].get("args", ())[2:3])


def test_what_was_prepared_for_one_call_is_forgotten_with_it(calls: list[dict[str, Any]]) -> None:
    backend = FlashAttnBackend()
    _, static, _ = called(backend, HALF)
    assert len(backend._rows) == 1
    del static
    gc.collect()
    assert len(backend._rows) == 0


def test_running_before_planning_is_an_error_and_no_rows_launch_nothing(calls: list[dict[str, Any]]) -> None:
    inputs = inputs_for(HALF, 8, 8)
    with pytest.raises(RuntimeError, match=r"flash_attn attention of layers\.0\.self_attn runs before it was planned"):
        FlashAttnBackend().run(*inputs.tensors(), HALF, static_batch([8]))
    empty = inputs_for(HALF, 0, 0)
    assert FlashAttnBackend().run(*empty.tensors(), HALF, static_batch([0])).shape == (0, 8, 128)
    assert not calls
