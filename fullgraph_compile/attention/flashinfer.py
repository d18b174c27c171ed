"""FlashInfer's FA2 and FA3 prefill kernels: CUDA, half precision, with and without pages.

FlashInfer builds its kernels with nvcc when they are first asked for, which takes a minute or more for each
combination of head size, dtype and feature, and keeps them on disk.  That happens in the first plan, so before any
capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fullgraph_compile.attention.base import AttentionBackend, Sentinel
from fullgraph_compile.attention.flashinfer_package import device_reasons, load_module, planner_arguments
from fullgraph_compile.attention.flashinfer_plan import (
    FloatWorkspaces,
    HostOffsets,
    PageTables,
    Plan,
    PlanKey,
    on_device,
    refuse_in_capture,
)
from fullgraph_compile.attention.real_rows import PerCall, RealRows
from fullgraph_compile.attention.reasons import equal_sizes, no_dtype, too_old
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.pinned import PinnedRing

_HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)

# FlashInfer's codes.
_CAUSAL, _NOT_CAUSAL, _ROWS_FIRST = 1, 0, 0


@dataclass
class _Call:
    """What was prepared for one ``StaticBatch``: a bucket, or one call at exact size."""

    graph: bool
    pages: PageTables | None
    rows: RealRows | None
    sites: tuple[AttentionSite, ...] = ()
    plans: dict[PlanKey, Plan] = field(default_factory=dict)


class FlashInferAttention(AttentionBackend):
    """Batch prefill of FlashInfer 0.6.15 and later, in its CUDA-graph mode.

    Each bucket has a plan for each kind of site, so that small buckets launch small grids; all plans share one
    workspace, which is made before the first capture and stays where it is.  Planning takes its lengths from the host:
    it neither reads the device nor waits for it.

    The functions under FlashInfer's wrappers are called, not the wrappers: those keep one pinned block, which the next
    plan would overwrite before the device has copied it.

    Attributes:
        kernels: "fa2", "fa3" (Hopper) or "auto": FA2 wherever it serves the site, as FA3 does not split the keys of a
            request, so that few new tokens after a long prefix leave most of the device idle.
        disable_split_kv: off, as with it FlashInfer 0.6 launches blocks in a graph whose work was never written.
    """

    name: ClassVar[str] = "flashinfer"
    sentinel: ClassVar[Sentinel] = Sentinel()
    paged: ClassVar[bool] = True
    kernels: ClassVar[str] = "auto"
    disable_split_kv: ClassVar[bool] = False

    def __init__(self) -> None:
        self._calls: PerCall[_Call] = PerCall()
        self._floats: dict[torch.device, FloatWorkspaces] = {}
        self._rings: dict[torch.device, PinnedRing] = {}

    # -- what it can do ------------------------------------------------------------------------------------------

    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        reasons = device_reasons(device)
        if self.disable_split_kv:
            reasons.append("disable_split_kv cannot be used together with graphs")
        return reasons + min((_kernel_reasons(site, k, device) for k in self._candidates()), key=len)

    def supports_pages(self, page_size: int, device: torch.device) -> list[str]:
        return []

    def _candidates(self) -> tuple[str, ...]:
        return ("fa2", "fa3") if self.kernels == "auto" else (self.kernels,)

    def _kernels_for(self, site: AttentionSite, device: torch.device) -> str:
        """Decided by the site alone: never by lengths, which change after the capture."""
        return next((k for k in self._candidates() if not _kernel_reasons(site, k, device)), self._candidates()[0])

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, batch: PrefillBatch, static: StaticBatch, sites: Sequence[AttentionSite]) -> None:
        if not static.tokens:
            return
        device = static.cu_q.device
        with on_device(device):
            host = HostOffsets(batch, static)
            call = self._call_for(batch, static, sites)
            if not call.plans or call.sites != tuple(sites):
                call.sites = tuple(sites)
                self._make_plans(call, static, host, device)
            if call.pages is not None:
                call.pages.update()
            if call.rows is not None:
                call.rows.update()
            for plan in call.plans.values():
                plan.update(host)

    def _call_for(self, batch: PrefillBatch, static: StaticBatch, sites: Sequence[AttentionSite]) -> _Call:
        call = self._calls.get(static)
        if call is None:
            refuse_in_capture(static.cu_q.device, "a plan would have to be made")
            pages = None if static.cache is None else PageTables(static)
            fa3 = {site.dtype for site in sites if self._kernels_for(site, static.cu_q.device) == "fa3"}
            rows = RealRows(static, fa3) if fa3 and static.cache is None else None
            call = _Call(not _exact(batch, static), pages, rows)
            self._calls.set(static, call)
        elif not call.graph:
            # The metadata of an exact size is planned once: this is a bucket whose first batch happened to fill it.
            call.graph, call.plans = True, {}
        return call

    def _make_plans(self, call: _Call, static: StaticBatch, host: HostOffsets, device: torch.device) -> None:
        floats = self._floats.setdefault(device, FloatWorkspaces(device))
        ring = self._rings.setdefault(device, PinnedRing(device))
        more = planner_arguments(split=not self.disable_split_kv)
        keys = dict.fromkeys(PlanKey.of(site, self._kernels_for(site, device), static) for site in call.sites)
        for key in keys.keys() - call.plans.keys():  # a graph may know the others
            module = load_module(key)
            call.plans[key] = Plan(key, module, more, static, host, graph=call.graph, floats=floats, ring=ring)

    # -- running -------------------------------------------------------------------------------------------------

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
        out = q.new_empty(q.shape[0], site.heads, site.value_head_size)
        if not q.shape[0]:
            return out
        call = self._calls.get(static)
        key = PlanKey.of(site, self._kernels_for(site, q.device), static)
        plan = None if call is None else call.plans.get(key)
        if call is None or plan is None or plan.info is None:
            raise RuntimeError(f"flashinfer attention of {site.module or site.node} runs before it was planned")
        if not plan.graph:
            refuse_in_capture(q.device, "the plan of one call at exact size would be kept")
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        with on_device(q.device):
            arguments: dict[str, Any] = {
                "float_workspace_buffer": plan.floats, "int_workspace_buffer": plan.ints, "plan_info_vec": plan.info,
                "q": q, "o": out, "maybe_lse": None, "qo_indptr": static.pad_cu_q,
                "mask_mode": _CAUSAL if site.causal else _NOT_CAUSAL, "layout": _ROWS_FIRST, "window_left": key.window,
                "enable_pdl": _chained_launches(q.device), "maybe_custom_mask": None, "maybe_mask_indptr": None,
                "maybe_alibi_slopes": None if slopes is None else slopes.float().contiguous(),
                "maybe_prefix_len_ptr": None, "maybe_token_pos_in_items_ptr": None, "maybe_max_item_len_ptr": None,
                "logits_soft_cap": site.softcap, "sm_scale": site.scale, "scale_q": None, "scale_k": None,
                "scale_v": None, "rope_scale": 1.0, "rope_theta": 1e4, "token_pos_in_items_len": 0,
            }  # fmt: skip
            if call.pages is None:
                if key.kernels == "fa3" and call.rows is not None:
                    # FA3 loads whole tiles of V, past the last request.
                    v = call.rows.only(v)
                plan.module.ragged_run(k=k, v=v, kv_indptr=static.pad_cu_k, **arguments)
            else:
                assert static.cache is not None
                plan.module.paged_run(
                    paged_k_cache=static.cache.k[site.index], paged_v_cache=static.cache.v[site.index],
                    paged_kv_indptr=call.pages.indptr, paged_kv_indices=call.pages.indices,
                    paged_kv_last_page_len=call.pages.on_last_page, workspace_size=plan.floats.numel(), **arguments,
                )  # fmt: skip
        return out


class FlashInferFA2(FlashInferAttention):
    """FlashInfer with its FA2 kernels, which split the keys of long requests."""

    name: ClassVar[str] = "flashinfer_fa2"
    kernels: ClassVar[str] = "fa2"


class FlashInferFA3(FlashInferAttention):
    """FlashInfer with its FA3 kernels, for Hopper."""

    name: ClassVar[str] = "flashinfer_fa3"
    kernels: ClassVar[str] = "fa3"


def _exact(batch: PrefillBatch, static: StaticBatch) -> bool:
    """Whether the metadata was made for this batch alone, as far as its bounds tell."""
    bounds = (static.tokens, static.slots, static.max_q, static.max_k)
    return bounds == (batch.tokens, batch.requests, max(2, *batch.new_tokens), max(1, batch.longest))


def _kernel_reasons(site: AttentionSite, kernels: str, device: torch.device) -> list[str]:
    reasons = []
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        if kernels == "fa2":
            reasons += too_old(device, 8, 0)
        if kernels == "fa3" and major != 9:
            reasons.append(f"compute capability is {major}.{minor}; FlashInfer's FA3 kernels are for 9.0")
    reasons += [*no_dtype(site, *_DTYPES), *equal_sizes(site)]
    for size in sorted({site.head_size, site.value_head_size} - set(_HEAD_SIZES)):
        reasons.append(f"head size {size} is none of {', '.join(map(str, _HEAD_SIZES))}")
    if site.heads % site.kv_heads:
        reasons.append(f"{site.heads} query heads are no multiple of {site.kv_heads} key heads")
    if site.right > 0:
        reasons.append(f"a query sees {site.right} keys to its right; it knows 0 and all")
    elif site.right < 0 <= site.left:
        # FA2's planner takes it that no key to the right of a tile is seen.
        reasons.append("it has no window for two-sided attention, the site has one")
    if site.sinks:
        reasons.append("it has no attention sinks, the site has them")
    if site.slopes and kernels == "fa3":
        reasons.append("its FA3 kernels have no ALiBi slopes, the site has them")
    elif site.slopes and site.softcap:
        reasons.append("it adds ALiBi slopes before the soft cap, the site after it")
    return reasons


@cache
def _chained_launches(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one ahead of it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
