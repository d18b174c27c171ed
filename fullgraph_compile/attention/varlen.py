"""FlashAttention 2 as it ships inside torch (behind ``torch.nn.attention.varlen``): CUDA, half precision, no pages."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend, Sentinel
from fullgraph_compile.attention.reasons import equal_sizes, features, no_cuda, no_dtype, sizes, too_old
from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.ops import AttentionSite

# What torch.nn.attention.varlen calls.  Its front launches one more kernel, which clears a random state that nobody
# reads, and may choose another library's kernel, which is not known to zero rows without keys.
try:
    flash_attention = torch.ops.aten._flash_attention_forward.default
except AttributeError:  # a build without it
    flash_attention = None  # type: ignore[assignment]

_MAX_HEAD_SIZE = 256


class VarlenAttention(AttentionBackend):
    """FA2's varlen kernel, which reads all lengths on the device.

    NOTE: The kernel leaves rows past the last offset unwritten.  They are zeroed by the kernel itself: it is given
    one more request (``pad_cu_q``, ``pad_cu_k``) that holds all padded rows and has no keys, and FA2 writes zeros for
    a request without keys.  So ``static.max_q`` must bound the padded rows too, which the bucket does.

    NOTE: ``max_q`` is never 1.  FA2's host code takes another path then (it swaps head groups into the query dim and
    drops the causal flag), which a graph would keep for all later batches.
    """

    name: ClassVar[str] = "varlen"
    sentinel: ClassVar[Sentinel] = Sentinel()

    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        return [
            *_device_reasons(device),
            *no_dtype(site, torch.float16, torch.bfloat16),
            *equal_sizes(site),
            *sizes(site, _MAX_HEAD_SIZE),
            *features(site, softcap=True, sinks=True, slopes=True),
        ]

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        site: AttentionSite,
        static: StaticBatch,
    ) -> Tensor:
        if not q.shape[0]:
            return q.new_zeros(q.shape)
        # The kernel needs the elements of a head beside each other; rows may be any distance apart.
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        # The op takes a causal mask as a flag, and as a window that ends at the query.
        causal = site.left < 0 and site.right == 0
        out: Tensor = flash_attention(
            q,
            k,
            v,
            static.pad_cu_q,
            static.pad_cu_k,
            max(2, static.max_q),
            static.max_k,
            0.0,
            causal,
            False,
            scale=site.scale,
            window_size_left=site.left,
            window_size_right=site.right,
        )[0]
        # Laid out as the query was: the op promises contiguous.
        return out.contiguous()


def _device_reasons(device: torch.device) -> list[str]:
    if device.type == "cuda" and flash_attention is None:
        return ["this torch has no aten::_flash_attention_forward"]
    if reasons := no_cuda(device, rocm="on ROCm its kernel is another one, which is not known to zero padded rows"):
        return reasons
    if not torch.backends.cuda.is_flash_attention_available():
        return ["this torch was built without FlashAttention"]
    return too_old(device, 8, 0)
