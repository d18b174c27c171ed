"""The metadata of our own attention, worked out in the graph from the vectors that SGLang keeps at fixed addresses.

SGLang rewrites lengths, request rows and write slots before each replay, sentinels included, so the first launch of a
graph is all that is left to do: the host does nothing for attention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# Triton's language, as the kernel below names it; set when the kernel is first made.
tl: Any = None

# Each vector starts at a multiple of 16 bytes, as kernels are compiled for that.
_ALIGNED = 4


class Lengths:
    """Lengths and offsets of ``slots`` requests, rewritten in full by ``compute``.

    Args:
        new: ``[at least slots]`` integers: new tokens of each request; 0 past the live ones.
        total: ``[at least slots]`` integers: cached and new tokens of each request; 0 past the live ones.
        slots: request slots R.

    Attributes:
        cu_q: ``[R + 1]`` int32, where each request's queries start; tail = real total.
        cu_k: ``[R + 1]`` int32, the same of keys.
        q_lens: ``[R]`` int32.
        k_lens: ``[R]`` int32.
        real: ``[1]`` int32, the real total of rows.
    """

    def __init__(self, new: Tensor, total: Tensor, slots: int) -> None:
        self.new, self.total, self.slots = new[:slots], total[:slots], slots
        sizes = (slots + 1, slots + 1, slots, slots, 1)
        room = [-(-n // _ALIGNED) * _ALIGNED for n in sizes]
        with torch.inference_mode(False):
            block = torch.zeros(sum(room), dtype=torch.int32, device=new.device)
        self.cu_q, self.cu_k, self.q_lens, self.k_lens, self.real = (
            part[:n] for part, n in zip(block.split(room), sizes, strict=True)
        )

    def compute(self) -> None:
        """Read ``new`` and ``total`` and write all else, on the current stream; to be captured."""
        if self.new.device.type == "cuda" and lengths_kernel() is not None:
            with torch.cuda.device(self.new.device):
                self.launch()
            return
        for given, lens, ends in ((self.new, self.q_lens, self.cu_q), (self.total, self.k_lens, self.cu_k)):
            lens.copy_(given)
            ends[:1].zero_()
            ends[1:].copy_(lens.cumsum(0))
        self.real.copy_(self.cu_q[-1:])

    def launch(self) -> None:
        """The one launch that ``compute`` is on CUDA."""
        lengths_kernel()[(1,)](
            self.new, self.total, self.cu_q, self.cu_k, self.q_lens, self.k_lens, self.real, self.slots,
            SLOTS=max(16, 1 << (self.slots - 1).bit_length()), num_warps=1,
        )  # fmt: skip


@functools.cache
def lengths_kernel() -> Any:
    """The compiled kernel, or None where Triton is not installed."""
    global tl
    try:
        import triton
        import triton.language
    except ImportError:
        return None
    tl = triton.language
    return triton.jit(_lengths, do_not_specialize=["slots"])


def _lengths(new, total, cu_q, cu_k, q_lens, k_lens, real, slots, SLOTS: tl.constexpr):
    slot = tl.arange(0, SLOTS)
    here = slot < slots
    q = tl.load(new + slot, mask=here, other=0).to(tl.int32)
    k = tl.load(total + slot, mask=here, other=0).to(tl.int32)
    tl.store(q_lens + slot, q, mask=here)
    tl.store(k_lens + slot, k, mask=here)
    tl.store(cu_q + 1 + slot, tl.cumsum(q, 0), mask=here)
    tl.store(cu_k + 1 + slot, tl.cumsum(k, 0), mask=here)
    tl.store(cu_q, 0)
    tl.store(cu_k, 0)
    tl.store(real, tl.sum(q, 0))
