"""The physical limit of a forward on this machine: weights must be read, and tokens multiplied with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullgraph_compile.bench.timing import median_ms


@dataclass(frozen=True)
class Limit:
    """What the machine was measured to do, and what the body asks of it.

    Attributes:
        bandwidth: bytes a second that are read from memory.
        rate: floating point operations a second of a large matrix product in the dtype of the weights.
        weight_bytes: of the weights that every call reads, as ``models.projections`` counts them.
        weights: numbers in them.
    """

    bandwidth: float
    rate: float
    weight_bytes: int
    weights: int

    def ms(self, tokens: int) -> float:
        """No forward of so many tokens can be faster: the larger of reading all weights once and multiplying each
        token with them.  Attention and all else are left out."""
        return max(self.weight_bytes / self.bandwidth, 2 * tokens * self.weights / self.rate) * 1e3


def measure_limit(weights: int, dtype: torch.dtype, device: torch.device) -> Limit:
    """Measure memory bandwidth and matrix rate of a device.

    Args:
        weights: numbers in the weights that every call reads.
        dtype: of the weights.
    """
    return Limit(_bandwidth(device), _rate(dtype, device), weights * dtype.itemsize, weights)


def _bandwidth(device: torch.device) -> float:
    size = 4 << 30 if device.type == "cuda" else 256 << 20
    while device.type == "cuda" and size > 64 << 20 and torch.cuda.mem_get_info(device)[0] < 2 * size:
        size //= 2
    matrix = torch.ones(size // 4 // 8192, 8192, device=device)
    vector = torch.ones(8192, device=device)
    ways = (lambda _: matrix.sum(), lambda _: matrix.amax(), lambda _: matrix @ vector)
    return max(matrix.nbytes / (median_ms(way, [vector], device, repeats=10) / 1e3) for way in ways)


def _rate(dtype: torch.dtype, device: torch.device) -> float:
    found = []
    for n in (4096, 8192) if device.type == "cuda" else (512, 1024):
        a = torch.randn(n, n, device=device).to(dtype)
        found.append(2 * n**3 / (median_ms(lambda x: x @ x, [a], device, repeats=20) / 1e3))
    return max(found)
