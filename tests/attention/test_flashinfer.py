"""FlashInfer: what it refuses by name, and what it takes; asked without a GPU or the package."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fullgraph_compile.attention import create_attention, flashinfer, flashinfer_package
from fullgraph_compile.attention.flashinfer import FlashInferAttention, FlashInferFA2, FlashInferFA3
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import HALF

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and the package, as far as is asked."""
    monkeypatch.setattr(flashinfer, "device_reasons", lambda device: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


REASONS: dict[str, tuple[AttentionSite, str]] = {
    "fp32": (replace(HALF, dtype=torch.float32), "dtype is torch.float32; it computes in float16 and bfloat16 only"),
    "value head size": (
        replace(HALF, head_size=128),
        "key head size 128 and value head size 64 differ; it needs equal ones",
    ),
    "head size": (replace(HALF, head_size=80, value_head_size=80), "head size 80 is none of 64, 128, 256"),
    "groups": (replace(HALF, kv_heads=3), "8 query heads are no multiple of 3 key heads"),
    "right window": (replace(HALF, right=3), "a query sees 3 keys to its right; it knows 0 and all"),
    "two-sided window": (
        replace(HALF, left=4, right=-1),
        "it has no window for two-sided attention, the site has one",
    ),
    "sinks": (replace(HALF, sinks=True), "it has no attention sinks, the site has them"),
    "slopes and cap": (
        replace(HALF, slopes=True, softcap=3.0),
        "it adds ALiBi slopes before the soft cap, the site after it",
    ),
}


@pytest.mark.parametrize("what", REASONS)
def test_what_it_cannot_do_is_said_in_words(what: str, hopper: None) -> None:
    site, reason = REASONS[what]
    assert FlashInferFA2().supports(site, CUDA) == [reason]
    assert reason in FlashInferAttention().supports(site, CUDA)


def test_fa3_has_no_slopes(hopper: None) -> None:
    site = replace(HALF, slopes=True)
    assert FlashInferFA3().supports(site, CUDA) == ["its FA3 kernels have no ALiBi slopes, the site has them"]
    assert FlashInferAttention().supports(site, CUDA) == []


@pytest.mark.parametrize(
    "site",
    [
        HALF,
        replace(HALF, dtype=torch.float16, head_size=256, value_head_size=256, kv_heads=8),
        replace(HALF, left=7, softcap=30.0),
        replace(HALF, right=-1, scale=0.3, kv_heads=1),
    ],
)
@pytest.mark.parametrize("backend", [FlashInferAttention, FlashInferFA2, FlashInferFA3])
def test_what_it_can_do_has_no_reason_against_it(
    backend: type[FlashInferAttention], site: AttentionSite, hopper: None
) -> None:
    assert backend().supports(site, CUDA) == []
    assert type(create_attention(backend.name, [site], CUDA)) is backend


def test_a_device_without_the_kernels_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert FlashInferFA2().supports(HALF, CUDA) == []
    assert FlashInferFA3().supports(HALF, CUDA) == [
        "compute capability is 8.9; FlashInfer's FA3 kernels are for 9.0"
    ]  # fmt: skip


def test_b19_no_split_keys_together_with_graphs_is_refused_by_name(hopper: None) -> None:
    class Unsplit(FlashInferFA2):
        disable_split_kv = True

    assert Unsplit().supports(HALF, CUDA) == ["disable_split_kv cannot be used together with graphs"]


def test_a_cpu_and_an_absent_package_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FlashInferAttention().supports(HALF, CPU) == ["the device is cpu; it runs on CUDA only"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flashinfer_package._package_reasons.cache_clear()
    monkeypatch.setattr(flashinfer_package.importlib.util, "find_spec", lambda name: None)
    assert flashinfer_package.device_reasons(CUDA) == ["the package flashinfer-python is not installed"]
    monkeypatch.undo()
    flashinfer_package._package_reasons.cache_clear()


@pytest.mark.parametrize(
    ("version", "found", "compiler", "said"),
    [
        ("0.6.14", None, True, "flashinfer-python is 0.6.14; it needs 0.6.15 or later"),
        ("0.7.2.post1", ImportError("no tvm"), True, "0.7.2.post1 cannot be imported: ImportError: no tvm"),
        ("0.7.2.post1", None, False, "builds its kernels with nvcc, which is neither in PATH nor under CUDA_HOME"),
        ("0.6.15.post1", None, True, ""),
    ],
)
def test_a_package_that_is_of_no_use_is_a_reason(
    version: str, found: Exception | None, compiler: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> object:
        if found is not None:
            raise found
        return object()

    package = flashinfer_package
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(package.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(package.importlib, "import_module", load)
    monkeypatch.setattr(package, "_has_compiler", lambda: compiler)
    reasons = package._package_reasons.__wrapped__()
    assert said in " ".join(reasons) and bool(reasons) == bool(said)
