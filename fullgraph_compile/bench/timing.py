"""Times and memory of calls on one device."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.bench.interrupts import raise_if_interrupted


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(
    call: Callable[[Tensor], Any],
    inputs: Sequence[Tensor],
    device: torch.device,
    *,
    repeats: int = 50,
    at_most_s: float = 3.0,
    warm: int = 3,
    wait: bool = True,
) -> float:
    """Median wall time of a call in ms over rotating inputs, with the device idle before each.

    Args:
        call: what is timed.
        inputs: taken in turn.
        repeats: calls that are timed, fewer if they take longer than ``at_most_s`` together, but three at least.
        warm: calls before.
        wait: whether a call ends when its result is ready, or when it returns.
    """
    for i in range(warm):
        call(inputs[i % len(inputs)])
    found: list[float] = []
    while len(found) < 3 or (len(found) < repeats and sum(found) < at_most_s * 1e3):
        raise_if_interrupted()
        synchronize(device)
        start = time.perf_counter()
        call(inputs[len(found) % len(inputs)])
        if wait:
            synchronize(device)
        found.append((time.perf_counter() - start) * 1e3)
    synchronize(device)
    return statistics.median(found)


def device_us(call: Callable[[], Any], *, repeats: int) -> float:
    """Median time in us that the work of a call takes on the current GPU, by CUDA events.

    The GPU is kept busy until the call is queued, so that a slow host is not in it.

    Args:
        call: queues work on the current stream.
        repeats: calls that are timed, after three that are not.
    """
    for _ in range(3):
        call()
    found: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(6_000_000)  # longer than a slow host takes to queue a call
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device after unused memory went back; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def machine() -> str:
    """The device and the versions, in one line."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    versions = [f"torch {torch.__version__}"]
    for package in ("triton", "transformers", "fullgraph-compile"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([name, *versions, f"Python {platform.python_version()}"])
