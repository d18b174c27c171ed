"""FlashInfer's prefill plan under SGLang's full graphs, from lengths that the host knows anyway.

SGLang has one set of wrappers for all buckets, so that each launches the grid of the largest, and FlashInfer's own plan
reads offsets back from the device three times, each time waiting for all work before it.  Here each bucket has wrappers
of its own, which share their memory, as replays follow each other on one stream; and a replay is planned from the
lengths in SGLang's batch.

What attention reads besides the plan, offsets and the cache's rows, is a function of SGLang's static buffers alone.
SGLang's own code computes it before each replay; or, on demand and where SGLang gathers rows by a kernel that this
module knows, the graph does so at its beginning, and a replay's metadata is one plan.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention.flashinfer_package import planner_arguments
from fullgraph_compile.integrations.sglang.settings import OPTIONS
from fullgraph_compile.pinned import PinnedRing

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
    if getattr(attention, "use_sliding_window_kv_pool", False):
        return "sliding windows have a cache of their own"
    if getattr(attention, "num_wrappers", None) != 1 or getattr(attention, "dispatch_reason", None) is not None:
        return "it has more than one kind of attention (sliding window, or cross attention)"
    lost = [n for n in _NEEDED if not hasattr(attention, n)]
    return f"it has no {', '.join(lost)}" if lost else None


_NEEDED = ("full_cg_prefill_wrappers", "_create_full_cg_prefill_wrappers", "init_forward_metadata_out_graph")


class HostPlans:
    """Stands for the metadata call of one attention backend; ``install`` puts it there.

    Attributes:
        left: buckets whose replays SGLang plans, on the wrappers of this object, as that was measured to be faster.

    Args:
        attention: SGLang's FlashInferAttnBackend.
        runner: its prefill runner.
        in_graph: whether the graph computes what attention reads besides the plan, where this module knows how.
    """

    def __init__(self, attention: Any, runner: Any, in_graph: bool) -> None:
        self.attention, self.runner = attention, runner
        self.left: set[int] = set()
        self._gather = _gather_kernel(attention, runner) if in_graph else None
        # By bucket: heads, key heads, head size and window of its plans, where it is known to be a plain one.
        self._facts: dict[int, tuple[int, int, int, int]] = {}
        # SGLang's own, also where an earlier runner's plans stand for it.
        self._prepare = types.MethodType(type(attention).init_forward_metadata_out_graph, attention)
        self._wrappers: dict[int, list[Any]] = {}
        self._captured: dict[int, list[int]] = {}
        self._ring: PinnedRing | None = None
        # The bucket that is being captured.
        self._bucket: int | None = None
        # Of the replay that is being planned: its bucket and the lengths of its request slots.
        self._planning: tuple[int, list[int], list[int]] | None = None

    def install(self) -> None:
        self.attention.init_forward_metadata_out_graph = self.prepare
        if self._gather is None:
            return
        forward = self.runner._run_forward

        def run_forward(forward_batch: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            # Called by captures alone.
            if num_tokens in self._facts and _plain(forward_batch):
                self._read(num_tokens, forward_batch)
            return forward(forward_batch, num_tokens, *args, **kwargs)

        self.runner._run_forward = run_forward

    def remove(self) -> None:
        """Leave all to SGLang again."""
        del self.attention.init_forward_metadata_out_graph
        self._facts.clear()  # so nothing more is computed in a graph

    def _read(self, bucket: int, batch: Any) -> None:
        """In the graph: offsets of queries and keys, and the cache's rows, from the static buffers."""
        assert self._gather is not None
        [wrapper] = self._wrappers[bucket]
        pages = self.attention.indices_updater_prefill.req_to_token
        keys = wrapper._paged_kv_indptr_buf
        torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=wrapper._qo_indptr_buf[1:])
        torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=keys[1:])
        self._gather[(int(batch.batch_size),)](
            pages, batch.req_pool_indices, batch.seq_lens, keys, None, wrapper._paged_kv_indices_buf, pages.shape[1]
        )

    def prepare(self, forward_batch: Any, in_capture: bool = False) -> Any:
        """SGLang's ``init_forward_metadata_out_graph``; anything but plain prefill is left to it."""
        if not _plain(forward_batch):
            return self._prepare(forward_batch, in_capture=in_capture)
        if in_capture:
            return self._prepare_capture(forward_batch)
        tokens = int(sum(forward_batch.extend_seq_lens_cpu))
        # SGLang's own rule.
        bucket = min(b for b in self._wrappers if b >= tokens)
        self.attention.full_cg_prefill_wrappers = self._wrappers[bucket]
        if bucket in self.left:
            return self._prepare(forward_batch, in_capture=False)
        slots = int(forward_batch.batch_size)
        new = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        lengths = [int(n) for n in forward_batch.seq_lens_cpu.tolist()]
        new, lengths = [*new, *[0] * (slots - len(new))], [*lengths, *[0] * (slots - len(lengths))]
        if self._gather is not None and bucket in self._facts:
            return self._plan(bucket, self._wrappers[bucket][0], new, lengths)
        self._planning = bucket, new, lengths
        try:
            return self._prepare(forward_batch, in_capture=False)
        finally:
            self._planning = None

    def _prepare_capture(self, forward_batch: Any) -> Any:
        bucket = int(forward_batch.positions.numel())
        if bucket not in self._wrappers:
            self._wrappers[bucket] = self._new_wrappers(int(forward_batch.batch_size), bucket)
        self.attention.full_cg_prefill_wrappers = wrappers = self._wrappers[bucket]
        self._bucket = bucket
        try:
            result = self._prepare(forward_batch, in_capture=True)
        finally:
            self._bucket = None
        self._captured[bucket] = [int(x) for x in wrappers[0]._plan_info]
        return result

    def _new_wrappers(self, slots: int, bucket: int) -> list[Any]:
        """SGLang makes the first, of the largest bucket; the others get its memory."""
        if not self._wrappers:
            wrappers = self.attention._create_full_cg_prefill_wrappers(slots, bucket)
        else:
            wrappers = [_twin(w, self.attention.prefill_backend) for w in next(iter(self._wrappers.values()))]
        if self._ring is None:
            # Now, as pinning memory waits for the device.
            self._ring = PinnedRing(wrappers[0].device, BLOCKS)
            self._ring.reserve(wrappers[0]._pin_memory_int_workspace_buffer.numel())
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
            if not unusual and page_size == 1 and self._bucket is not None:
                self._facts[self._bucket] = heads, kv_heads, head_size, int(kwargs.get("window_left", -1))
            arguments = (qo_indptr, kv_indptr, kv_indices, last_page_len, heads, kv_heads, head_size, page_size)
            type(wrapper).plan(wrapper, *arguments, **kwargs)
            return
        bucket, new, lengths = self._planning
        wrapper._qo_indptr_buf.copy_(qo_indptr, non_blocking=True)
        wrapper._paged_kv_indptr_buf.copy_(kv_indptr, non_blocking=True)
        wrapper._paged_kv_indices_buf[: kv_indices.shape[0]].copy_(kv_indices, non_blocking=True)
        self._facts[bucket] = heads, kv_heads, head_size, int(kwargs.get("window_left", -1))
        self._plan(bucket, wrapper, new, lengths)

    def _plan(self, bucket: int, wrapper: Any, new: Sequence[int], lengths: Sequence[int]) -> None:
        """Write a replay's work lists where its graph reads them."""
        heads, kv_heads, head_size, window = self._facts[bucket]
        assert self._ring is not None
        info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, self._ring.take().bytes, _offsets(new),
            _offsets(lengths), torch.tensor(lengths, dtype=torch.int32), wrapper._max_total_num_rows, len(new),
            heads, kv_heads, 1, True, head_size, head_size, False, window, *planner_arguments(split=True),
        )  # fmt: skip
        plan = [int(x) for x in info]
        if plan != self._captured[bucket]:
            raise RuntimeError(
                f"FlashInfer planned bucket {bucket} as {plan}, but its graph was captured with "
                f'{self._captured[bucket]}; {OPTIONS}=\'{{"plan": "sglang"}}\' leaves plans to SGLang'
            )


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


def _gather_kernel(attention: Any, runner: Any) -> Any:
    """SGLang's kernel that lists the cache's rows of all requests; None where it does so in another way."""
    updater = getattr(attention, "indices_updater_prefill", None)
    update = getattr(updater, "update", None)
    kernel = getattr(sys.modules[type(attention).__module__], "create_flashinfer_kv_indices_triton", None)
    known = update is not None and "plan" not in inspect.signature(update).parameters
    return kernel if known and hasattr(updater, "req_to_token") and hasattr(runner, "_run_forward") else None


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


def plans_of(attention: Any) -> HostPlans | None:
    """What plans an attention backend's prefill; None = SGLang."""
    owner = getattr(getattr(attention, "init_forward_metadata_out_graph", None), "__self__", None)
    return owner if isinstance(owner, HostPlans) else None


def install(attention: Any, runner: Any, *, in_graph: bool = False) -> str | None:
    """Plan an attention backend's prefill from the host; why that cannot be done, where it cannot.

    Args:
        runner: SGLang's prefill runner, before it captures.
        in_graph: see ``HostPlans``.
    """
    why = unsupported(attention, runner)
    if why is None:
        HostPlans(attention, runner, in_graph).install()
    return why


def remove(attention: Any) -> None:
    """Leave an attention backend's plans to it again."""
    plans = plans_of(attention)
    if plans is not None:
        plans.remove()
