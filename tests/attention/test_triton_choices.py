"""What the kernel of our own declares of sites and devices, and how it cuts the work: nothing is launched."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fullgraph_compile.attention.triton as module
from fullgraph_compile.attention.triton import TritonAttention, choose_config, padded_size
from tests.attention.cases import FEATURES, SITE

CUDA = torch.device("cuda", 0)
H200 = (132, 232448)


# What it declares.


def test_it_says_what_is_wrong_with_a_site_and_a_device() -> None:
    odd = replace(SITE, dtype=torch.float64, head_size=300, value_head_size=512, kv_heads=3)
    reasons = TritonAttention().supports(odd, torch.device("cpu"))
    assert reasons == [
        "the device is cpu; it runs on CUDA only",
        "dtype is torch.float64; it computes in float32, float16 and bfloat16",
        "head size 300 is above 256",
        "head size 512 is above 256",
        "4 query heads are no multiple of 3 key heads",
    ]


def test_a_missing_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert TritonAttention().supports(SITE, CUDA) == ["the package triton is not installed"]


def test_an_old_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert TritonAttention().supports(SITE, CUDA) == ["compute capability 7.5 is below 8.0"]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_declares_every_feature(feature: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_device_reasons", lambda device: [])
    assert TritonAttention().supports(replace(FEATURES[feature][0], dtype=dtype), CUDA) == []


def test_asking_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from fullgraph_compile.attention.triton import TritonAttention as T;"
        "from tests.attention.cases import SITE; before = 'triton' in sys.modules;"
        "T().supports(SITE, torch.device('cpu')); assert ('triton' in sys.modules) == before;"
        "assert 'fullgraph_compile.attention.triton_kernel' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())


# How it cuts the work.

LARGE = replace(SITE, heads=32, kv_heads=8, head_size=128, value_head_size=128, dtype=torch.bfloat16)


def test_few_tokens_with_long_keys_are_split_and_many_tokens_are_not() -> None:
    assert choose_config(LARGE, 30, 8192, *H200).chunk > 0
    assert choose_config(LARGE, 30, 32, *H200).chunk == 0  # no cache: no key range is long
    assert choose_config(LARGE, 2048, 8192, *H200).chunk == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 30, 128, 512, 2048, 16384])
@pytest.mark.parametrize("shared_memory", [101376, 232448])
def test_buffers_are_bounded_and_blocks_fit(dtype: torch.dtype, size: int, tokens: int, shared_memory: int) -> None:
    site = replace(LARGE, dtype=dtype, head_size=size, value_head_size=size)
    config = choose_config(site, tokens, 131072, 132, shared_memory)
    if config.chunk:
        assert config.chunks * tokens * site.heads * (size + 2) * 4 <= 40 * 2**20
    keys = 2 * config.block_n * config.stages
    assert config.stages == 1 or dtype.itemsize * size * (config.block_m + keys) <= shared_memory
    assert all(n & (n - 1) == 0 for n in (config.block_m, config.block_n, config.warps, config.chunk, config.chunks))


@pytest.mark.parametrize(("size", "padded"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128), (256, 256)])
def test_head_sizes_are_padded_to_a_power_of_two(size: int, padded: int) -> None:
    assert padded_size(size) == padded
