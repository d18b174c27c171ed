"""FlashInfer's prefill plan under SGLang's full graphs, from lengths that the host knows anyway.

SGLang has one set of wrappers for all buckets, so that each launches the grid of the largest, and FlashInfer's own plan
reads offsets back from the device three times, each time waiting for all work before it.  Here each bucket has wrappers
of its own, which share their memory, as replays follow each other on one stream; and a replay is planned from the
lengths in SGLang's batch.  What indices are gathered, and how, stays SGLang's own code.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention.flashinfer_package import planner_arguments
from fullgraph_compile.attention.flashinfer_plan import PinnedBlocks
from fullgraph_compile.integrations.sglang.settings import OPTIONS
from fullgraph_compile.report import log


class _Blocks(PinnedBlocks):
    # Each is as large as FlashInfer's own, 8 MiB; the host is a few replays ahead at most.
    BLOCKS = 4


def unsupported(attention: Any, runner: Any) -> str | None:
    """Why the plans of an attention backend stay SGLang's own; None = they need not."""
    if any(getattr(runner, n, False) for n in ("require_mlp_tp_gather", "require_attn_tp_gather")):
        return "ranks agree on a bucket, which need not be the nearest"
    if type(attention).__name__ != "FlashInferAttnBackend":
        return f"attention is {type(attention).__name__}"
    if getattr(attention, "prefill_backend", None) != "fa2":
        return f"its kernels are {getattr(attention, 'prefill_backend', None)!r}, not 'fa2'"
    if getattr(attention, "num_wrappers", None) != 1 or getattr(attention, "dispatch_reason", None) is not None:
        return "it has more than one kind of attention (sliding window, or cross attention)"
    lost = [n for n in _NEEDED if not hasattr(attention, n)]
    return f"it has no {', '.join(lost)}" if lost else None


_NEEDED = ("full_cg_prefill_wrappers", "_create_full_cg_prefill_wrappers", "init_forward_metadata_out_graph")


class HostPlans:
    """Stands for the metadata call of one attention backend; ``install`` puts it there.

    Args:
        attention: SGLang's FlashInferAttnBackend.
    """

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self._prepare = attention.init_forward_metadata_out_graph
        self._wrappers: dict[int, list[Any]] = {}
        self._captured: dict[int, list[int]] = {}
        self._blocks: _Blocks | None = None
        # Of the replay that is being planned: its bucket and the lengths of its request slots.
        self._planning: tuple[int, list[int], list[int]] | None = None

    def install(self) -> None:
        self.attention.init_forward_metadata_out_graph = self.prepare

    def prepare(self, forward_batch: Any, in_capture: bool = False) -> Any:
        """SGLang's ``init_forward_metadata_out_graph``; anything but plain prefill is left to it."""
        if not _plain(forward_batch):
            return self._prepare(forward_batch, in_capture=in_capture)
        if in_capture:
            return self._prepare_capture(forward_batch)
        tokens = int(sum(forward_batch.extend_seq_lens_cpu))
        # SGLang's own rule.
        bucket = min(b for b in self._wrappers if b >= tokens)
        slots = int(forward_batch.batch_size)
        new = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        lengths = [int(n) for n in forward_batch.seq_lens_cpu.tolist()]
        self.attention.full_cg_prefill_wrappers = self._wrappers[bucket]
        self._planning = bucket, [*new, *[0] * (slots - len(new))], [*lengths, *[0] * (slots - len(lengths))]
        try:
            return self._prepare(forward_batch, in_capture=False)
        finally:
            self._planning = None

    def _prepare_capture(self, forward_batch: Any) -> Any:
        bucket = int(forward_batch.positions.numel())
        if bucket not in self._wrappers:
            self._wrappers[bucket] = self._new_wrappers(int(forward_batch.batch_size), bucket)
        self.attention.full_cg_prefill_wrappers = wrappers = self._wrappers[bucket]
        result = self._prepare(forward_batch, in_capture=True)
        self._captured[bucket] = [int(x) for x in wrappers[0]._plan_info]
        return result

    def _new_wrappers(self, slots: int, bucket: int) -> list[Any]:
        """SGLang makes the first, of the largest bucket; the others get its memory."""
        if not self._wrappers:
            wrappers = self.attention._create_full_cg_prefill_wrappers(slots, bucket)
        else:
            wrappers = [_twin(w, self.attention.prefill_backend) for w in next(iter(self._wrappers.values()))]
        if self._blocks is None:
            # Now, as pinning memory waits for the device.
            self._blocks = _Blocks(wrappers[0].device)
            self._blocks.reserve(wrappers[0]._pin_memory_int_workspace_buffer.numel())
        for wrapper in wrappers:
            wrapper.begin_forward = types.MethodType(self._begin, wrapper)
        return list(wrappers)

    def _begin(
        self, wrapper: Any, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor,
        heads: int, kv_heads: int, head_size: int, page_size: int, **kwargs: Any,
    ) -> None:  # fmt: skip
        """FlashInfer's plan; what it would read from the device is known."""
        unusual = [n for n in _UNUSUAL if kwargs.get(n) is not None]
        if self._planning is None or unusual or page_size != 1:
            arguments = (qo_indptr, kv_indptr, kv_indices, last_page_len, heads, kv_heads, head_size, page_size)
            type(wrapper).plan(wrapper, *arguments, **kwargs)
            return
        bucket, new, lengths = self._planning
        wrapper._qo_indptr_buf.copy_(qo_indptr, non_blocking=True)
        wrapper._paged_kv_indptr_buf.copy_(kv_indptr, non_blocking=True)
        wrapper._paged_kv_indices_buf[: kv_indices.shape[0]].copy_(kv_indices, non_blocking=True)
        plan = self._plan(wrapper, new, lengths, heads, kv_heads, head_size, int(kwargs.get("window_left", -1)))
        if plan != self._captured[bucket]:
            raise RuntimeError(
                f"FlashInfer planned bucket {bucket} as {plan}, but its graph was captured with "
                f'{self._captured[bucket]}; {OPTIONS}=\'{{"plan": "sglang"}}\' leaves plans to SGLang'
            )

    def _plan(
        self, wrapper: Any, new: Sequence[int], lengths: Sequence[int], heads: int, kv_heads: int, head_size: int,
        window: int,
    ) -> list[int]:  # fmt: skip
        assert self._blocks is not None
        with self._blocks.next() as pinned:
            info = wrapper._cached_module.plan(
                wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, pinned, _offsets(new),
                _offsets(lengths), torch.tensor(lengths, dtype=torch.int32), wrapper._max_total_num_rows, len(new),
                heads, kv_heads, 1, True, head_size, head_size, False, window, *planner_arguments(split=True),
            )  # fmt: skip
        return [int(x) for x in info]


_UNUSUAL = ("custom_mask", "packed_custom_mask", "fixed_split_size", "prefix_len_ptr", "token_pos_in_items_ptr")


def _plain(forward_batch: Any) -> bool:
    mode = forward_batch.forward_mode
    others = ("is_target_verify", "is_draft_extend_v2", "is_dllm_extend")
    return (
        mode.is_extend()
        and forward_batch.spec_info is None
        and not any(getattr(mode, name)() for name in others if hasattr(mode, name))
        and forward_batch.extend_seq_lens_cpu is not None
        and forward_batch.seq_lens_cpu is not None
    )


def _twin(wrapper: Any, kernels: str) -> Any:
    """A wrapper with the memory of another, for a plan of its own."""
    twin = type(wrapper)(
        wrapper._float_workspace_buffer, "NHD", use_cuda_graph=True, backend=kernels,
        qo_indptr_buf=wrapper._qo_indptr_buf, paged_kv_indptr_buf=wrapper._paged_kv_indptr_buf,
        paged_kv_indices_buf=wrapper._paged_kv_indices_buf,
        paged_kv_last_page_len_buf=wrapper._paged_kv_last_page_len_buf,
    )  # fmt: skip
    for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_kv_lens_buffer"):
        setattr(twin, name, getattr(wrapper, name))
    return twin


def _offsets(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def install(attention: Any, runner: Any) -> bool:
    """Plan an attention backend's prefill from the host, where it is one that can be."""
    why = unsupported(attention, runner)
    if why is not None:
        log.info("prefill attention is planned by SGLang: %s", why)
        return False
    HostPlans(attention).install()
    return True
