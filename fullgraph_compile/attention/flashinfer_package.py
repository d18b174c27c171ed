"""The package flashinfer-python: whether it can be used here, and its functions under the wrappers."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fullgraph_compile.attention.flashinfer_plan import PlanKey
from fullgraph_compile.attention.reasons import no_cuda

_PACKAGE = "flashinfer-python"
_OLDEST = (0, 6, 15)

# FlashInfer's codes of what is added to the scores.
_NO_POSITIONS, _ALIBI = 0, 2


def device_reasons(device: torch.device) -> list[str]:
    return no_cuda(device) or list(_package_reasons())


@cache
def _package_reasons() -> tuple[str, ...]:
    if importlib.util.find_spec("flashinfer") is None:
        return (f"the package {_PACKAGE} is not installed",)
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return (f"the package flashinfer is there without the metadata of {_PACKAGE}, so its version is not known",)
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST:
        return (f"{_PACKAGE} is {version}; it needs {'.'.join(map(str, _OLDEST))} or later",)
    try:
        importlib.import_module("flashinfer.prefill")
    except Exception as error:  # whatever a package raises while it loads
        return (f"{_PACKAGE} {version} cannot be imported: {type(error).__name__}: {error}",)
    if not _has_compiler():
        return (f"{_PACKAGE} builds its kernels with nvcc, which is neither in PATH nor under CUDA_HOME",)
    return ()


def _has_compiler() -> bool:
    if shutil.which("nvcc") or importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return any(home and os.path.exists(os.path.join(home, "bin", "nvcc")) for home in homes)


@cache
def planner_arguments(*, split: bool) -> tuple[Any, ...]:
    """What FA2's planner takes at the end: fixed split size, no split, other kernels' blocks, and from 0.7 on a query
    length that all requests have."""
    wrapper: Any = importlib.import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
    uniform = "uniform_q_len" in inspect.signature(wrapper.plan).parameters
    return (-1, not split, 0, *((0,) if uniform else ()))


def load_module(key: PlanKey) -> Any:
    """FlashInfer's functions for a key, built now if they never were.

    Raises:
        RuntimeError: they cannot be built.
    """
    get: Callable[..., Any] = importlib.import_module("flashinfer.prefill").get_batch_prefill_module
    try:
        return get(
            key.kernels, key.dtype, key.dtype, key.dtype, torch.int32, key.head_size, key.value_head_size,
            _ALIBI if key.slopes else _NO_POSITIONS, key.window >= 0, key.softcap, False,
        )  # fmt: skip
    except Exception as error:
        raise RuntimeError(f"flashinfer cannot build its {key.kernels} kernels for {key}: {error}") from error
