"""The FlashAttention packages that may be installed: what each can do, and how it is called."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fullgraph_compile.attention.reasons import equal_sizes, features, no_dtype, sizes
from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.ops import AttentionSite


class FlashLibrary(ABC):
    """One package.

    Attributes:
        package: its name on the package index.
        module: what is imported.
        zeros: whether it writes zeros for a request without keys; then such a request stands for the padded rows.
        reads_past_requests: whether it loads rows of V past the last request, where a NaN would reach the answer.
    """

    package: ClassVar[str]
    module: ClassVar[str]
    zeros: ClassVar[bool]
    reads_past_requests: ClassVar[bool]

    @classmethod
    def absent(cls) -> str:
        """Why the package cannot be imported, in words; empty = it can."""
        return _absent(cls.package, cls.module)

    def device_reasons(self, device: torch.device) -> list[str]:
        """Why it cannot run on a CUDA device."""
        major, minor = torch.cuda.get_device_capability(device)
        return [] if self.runs_on(major) else [f"{self.package} does not run on compute capability {major}.{minor}"]

    @abstractmethod
    def runs_on(self, major: int) -> bool: ...

    @abstractmethod
    def site_reasons(self, site: AttentionSite) -> list[str]:
        """Why it cannot serve a site."""

    @abstractmethod
    def page_reasons(self, page_size: int) -> list[str]:
        """Why it cannot read pages of this size."""

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, site: AttentionSite, static: StaticBatch
    ) -> Tensor:
        """Attend over ``k`` and ``v``: rows laid out by offsets, or the pages of the site where there is a cache."""


@cache
def _absent(package: str, module: str) -> str:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        found = False
    if not found:
        return f"the package {package} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package raises while it loads
        return f"{package} cannot be imported: {type(error).__name__}: {error}"
    return ""


def _causal(site: AttentionSite) -> bool:
    """A causal mask is a flag; as a window it would end at the query."""
    return site.left < 0 and site.right == 0


class FlashAttention3(FlashLibrary):
    """FA3 in the package fa3-fwd.  Its binary leaves features out, which it lists.

    NOTE: Keys are never split (``num_splits=1``): the count would be chosen from the bounds, which are those of the
    bucket.  The list of tiles is made on the device by a kernel of the same call, so it is right at each replay.
    """

    package: ClassVar[str] = "fa3-fwd"
    module: ClassVar[str] = "fa3_fwd_interface"
    zeros: ClassVar[bool] = True
    reads_past_requests: ClassVar[bool] = True

    @staticmethod
    def left_out() -> Mapping[str, bool]:
        """The build's flags FLASHATTENTION_DISABLE_<feature>, all taken for set where it has no list."""
        try:
            flags = importlib.import_module("fa3_fwd_config").CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            flags = {}
        names = ("PAGEDKV", "LOCAL", "SOFTCAP", "FP16", "VARLEN")
        return {name: bool(flags.get(f"FLASHATTENTION_DISABLE_{name}", name != "VARLEN")) for name in names}

    def runs_on(self, major: int) -> bool:
        return major == 9

    def site_reasons(self, site: AttentionSite) -> list[str]:
        out = self.left_out()
        known = (torch.bfloat16,) if out["FP16"] else (torch.float16, torch.bfloat16)
        reasons = no_dtype(site, *known) + sizes(site, 256)
        if out["VARLEN"]:
            reasons.append("it was built without requests of several lengths")
        qk, vo = site.head_size, site.value_head_size
        if qk != vo and not (qk <= 64 or (128 < qk <= 192 and 96 < vo <= 128)):
            reasons.append(f"key head size {qk} and value head size {vo} differ in a way that it does not know")
        return reasons + features(site, softcap=out["SOFTCAP"], sinks=True, slopes=True, window=out["LOCAL"])

    def page_reasons(self, page_size: int) -> list[str]:
        return ["fa3-fwd was built without paged KV"] if self.left_out()["PAGEDKV"] else []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, site: AttentionSite, static: StaticBatch
    ) -> Tensor:
        paged = static.cache is not None
        keys = (
            {"page_table": static.page_table, "seqused_k": static.k_lens}
            if paged
            else {"cu_seqlens_k": static.pad_cu_k, "max_seqlen_k": static.max_k}
        )
        out: Tensor = torch.ops.fa3_fwd.fwd(
            q, k, v, cu_seqlens_q=static.cu_q if paged else static.pad_cu_q, max_seqlen_q=max(2, static.max_q),
            softmax_scale=site.scale, is_causal=_causal(site), window_size_left=site.left, window_size_right=site.right,
            softcap=site.softcap, num_splits=1, **keys,
        )[0]  # fmt: skip
        return out


class FlashAttention4(FlashLibrary):
    """FA4 (``flash_attn.cute``).  It compiles a kernel for each kind of call on the first one, so in the warm-up."""

    package: ClassVar[str] = "flash-attn-4"
    module: ClassVar[str] = "flash_attn.cute.interface"
    zeros: ClassVar[bool] = False
    reads_past_requests: ClassVar[bool] = True

    def runs_on(self, major: int) -> bool:
        return major in (9, 10)

    def site_reasons(self, site: AttentionSite) -> list[str]:
        reasons = no_dtype(site, torch.float16, torch.bfloat16) + sizes(site, 128) + equal_sizes(site)
        return reasons + features(site, sinks=True, slopes=True)

    def page_reasons(self, page_size: int) -> list[str]:
        if page_size < 64:
            return []
        return [
            f"FA4 may load pages of {page_size} tokens whole, past a request's keys, where a NaN of an earlier request "
            "would reach the answer; give pages of less than 64 tokens"
        ]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, site: AttentionSite, static: StaticBatch
    ) -> Tensor:
        keys = (
            {"cu_seqlens_k": static.cu_k, "max_seqlen_k": static.max_k}
            if static.cache is None
            else {"page_table": static.page_table, "seqused_k": static.k_lens, "max_seqlen_k": static.max_k}
        )
        causal = _causal(site)
        window = tuple(None if n < 0 or causal else n for n in (site.left, site.right))
        found: Any = importlib.import_module(self.module).flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=static.cu_q, max_seqlen_q=max(2, static.max_q), softmax_scale=site.scale,
            causal=causal, window_size=window, softcap=site.softcap, **keys,
        )  # fmt: skip
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out


class FlashAttention2(FlashLibrary):
    """The package flash-attn.

    NOTE: ``max_seqlen_q`` is never 1, as its host code takes another path then, which a graph would keep.
    """

    package: ClassVar[str] = "flash-attn"
    module: ClassVar[str] = "flash_attn.flash_attn_interface"
    zeros: ClassVar[bool] = True
    reads_past_requests: ClassVar[bool] = False

    def runs_on(self, major: int) -> bool:
        return major >= 8

    def site_reasons(self, site: AttentionSite) -> list[str]:
        reasons = no_dtype(site, torch.float16, torch.bfloat16) + sizes(site, 256) + equal_sizes(site)
        if site.slopes and (site.right or site.softcap):
            # It takes the distance's size, where the op takes its sign too.
            reasons.append("it has ALiBi slopes for causal attention without a soft cap only")
        return reasons + features(site, sinks=True)

    def page_reasons(self, page_size: int) -> list[str]:
        if page_size % 256 == 0:
            return []
        return [f"flash-attn reads pages of a multiple of 256 tokens, these have {page_size}"]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, site: AttentionSite, static: StaticBatch
    ) -> Tensor:
        offsets = (static.pad_cu_q, static.pad_cu_k) if static.cache is None else (static.cu_q, static.cu_k)
        out: Tensor = importlib.import_module(self.module).flash_attn_varlen_func(
            q, k, v, *offsets, max(2, static.max_q), static.max_k, softmax_scale=site.scale, causal=_causal(site),
            window_size=(site.left, site.right), softcap=site.softcap,
            alibi_slopes=None if slopes is None else slopes.float(), block_table=static.page_table,
        )  # fmt: skip
        return out
