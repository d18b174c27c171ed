"""Our own attention in the captured body: on SGLang's KV pool, its table of slots and its lengths, where they are.

SGLang's own attention plans each batch on the host before the replay.  Here the graph's first launch derives all that
attention reads (``lengths``), so a replay is planned by nobody.  Keys and values are written to the very slots that
SGLang chose, in the layout that its decode reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention import UnsupportedAttention, create_attention
from fullgraph_compile.attention.base import AttentionBackend
from fullgraph_compile.attention.kv_write import write_kv
from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.integrations.sglang import host_plan
from fullgraph_compile.integrations.sglang.attention import HostedCall, Sites, replaced
from fullgraph_compile.integrations.sglang.lengths import Lengths
from fullgraph_compile.integrations.sglang.metadata import describe_attention, prefill_attention
from fullgraph_compile.integrations.sglang.pool import pools_of, why_not_module, why_not_runner
from fullgraph_compile.integrations.sglang.release import READ_ENDS, find
from fullgraph_compile.integrations.sglang.vectors import defer
from fullgraph_compile.ops import AttentionSite

_AUTO, _FASTEST = "auto", "triton"
# What FlashInfer keeps for the graphs that it attends in.
_FLASHINFER = (
    "full_cg_prefill_wrappers", "full_cg_prefill_workspace_buffer", "full_cg_prefill_qo_indptr",
    "full_cg_prefill_kv_indptr", "full_cg_prefill_kv_indices",
)  # fmt: skip


class OwnAttention:
    """Attends in SGLang's place, if ``choose`` says so.

    Args:
        runner: SGLang's prefill runner.
        wanted: "auto": on CUDA ours where it can, else SGLang's; the name of a backend of ours; "sglang".

    Attributes:
        backend: what attends; None = SGLang does.
        why: why SGLang does.
    """

    def __init__(self, runner: Any, wanted: str) -> None:
        self.runner, self.wanted = runner, wanted
        self.backend: AttentionBackend | None = None
        self.why = "it was asked for" if wanted == "sglang" else "nothing was captured"
        self._sites: tuple[AttentionSite, ...] = ()
        self._statics: dict[int, StaticBatch] = {}
        self._static: StaticBatch | None = None

    @property
    def words(self) -> str:
        """Who attends, for a log line."""
        if self.backend is not None:
            return f"{self.backend.name} on SGLang's KV pool"
        return f"SGLang's {describe_attention(self.runner.model_runner.attn_backend)} ({self.why})"

    def choose(self, sites: Sites, described: Sequence[AttentionSite]) -> bool:
        """Decide for all attention modules of a body, which were called once.

        Raises:
            RuntimeError: a backend was named that cannot serve them.
        """
        self.backend, self._static, self._statics = None, None, {}
        if self.wanted == "sglang":
            return False
        try:
            self.why = self._set_up(sites, described) or ""
        except (AttributeError, KeyError) as error:
            # Some release between those that were tested keeps its things elsewhere.
            self.why = f"this SGLang is built another way: {error}"
        if self.backend is None and self.wanted != _AUTO:
            raise RuntimeError(f"fullgraph_compile: attention={self.wanted!r} cannot be captured: {self.why}")
        return self.backend is not None

    def leave(self, why: str) -> None:
        """SGLang attends after all."""
        self.backend, self.why = None, why

    def _set_up(self, sites: Sites, described: Sequence[AttentionSite]) -> str | None:
        model_runner = self.runner.model_runner
        pool, table = model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token
        if self.wanted == _AUTO and table.device.type != "cuda":
            return f"the device is {table.device.type}"
        reasons = [why_not_runner(self.runner)]
        if sites.extras:
            reasons.append(f"attention gets {', '.join(sorted(sites.extras))}")
        if reasons == [None]:
            reasons = [why_not_module(m, t, pool) for m, t in zip(sites.modules, sites.dtypes, strict=True)]
        found = [reason for reason in reasons if reason is not None]
        if found:
            return found[0]
        self._sites = tuple(replace(s, dtype=t) for s, t in zip(described, sites.dtypes, strict=True))
        try:
            # What measured fastest with keys in pages, and reads a table that is not its own.
            name = _FASTEST if self.wanted == _AUTO else self.wanted
            backend = create_attention(name, self._sites, table.device)
        except UnsupportedAttention as error:
            return str(error)
        self._pools = pools_of(sites.modules, pool)
        vectors, slots = self.runner._prefill_static_buffers, int(self.runner._capture_req_slots)
        self._lengths = Lengths(vectors["extend_seq_lens"], vectors["seq_lens"], slots)
        self._rows, self._table = vectors["req_pool_indices"][:slots], table
        try:
            self._try(backend, sites.batch)
        except Exception as error:
            return f"{backend.name} failed: {type(error).__name__}: {error}"
        self.backend = backend
        return None

    def _try(self, backend: AttentionBackend, batch: Any) -> None:
        """Run each kind of site once, so that what cannot be built is known before anything depends on it."""
        self._begin(batch)
        assert self._static is not None
        for site in {replace(s, index=0, node="", module=""): s for s in self._sites}.values():
            q = torch.zeros(self._static.tokens, site.heads, site.head_size, dtype=site.dtype, device=self._rows.device)
            k, v = (pool[site.index][:1, 0].expand(len(q), -1, -1) for pool in (self._pools.k, self._pools.v))
            backend.run(q, k, v, None, None, site, self._static)

    # -- in the graph ----------------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        """The first thing of each pass over the body: what all its attention calls read.

        Args:
            batch: SGLang's batch of a bucket, with its slots at fixed addresses.
        """
        if self.backend is not None:
            self._begin(batch)

    def _begin(self, batch: Any) -> None:
        tokens = int(batch.input_ids.shape[0])
        if tokens not in self._statics:
            lengths, cache = self._lengths, self._pools
            self._statics[tokens] = StaticBatch(
                tokens, lengths.slots, max(2, tokens), int(self._table.shape[1]), lengths.cu_q, lengths.cu_k,
                lengths.q_lens, lengths.k_lens,
                # No backend that is taken here reads these two.
                pad_cu_q=lengths.cu_q, pad_cu_k=lengths.cu_k,
                num_real_tokens=lengths.real, cache=cache, page_table=self._table,  # type: ignore[arg-type]
                slot_ids=batch.out_cache_loc, table_rows=self._rows,
            )  # fmt: skip
        self._static = self._statics[tokens]
        self._lengths.compute()

    def attend(self, call: HostedCall, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """One attention call: write the new keys and values, then attend.

        Args:
            q: ``[tokens, heads * head_size]`` or with heads apart; likewise k and v, which are None where the module
                reads what another wrote.

        Returns:
            ``[tokens, heads * value_head_size]``; rows past the real total are zeros.
        """
        assert self.backend is not None and self._static is not None
        site, static = self._sites[call.module], self._static
        k_pages, v_pages = self._pools.k[site.index], self._pools.v[site.index]
        if k is not None and v is not None and call.save_kv:
            assert static.slot_ids is not None
            k, v = k.reshape(-1, *k_pages.shape[2:]), v.reshape(-1, *v_pages.shape[2:])
            write_kv(k, v, k_pages, v_pages, static.slot_ids, static.num_real_tokens)
        else:
            k, v = k_pages[:1, 0].expand(len(q), -1, -1), v_pages[:1, 0].expand(len(q), -1, -1)
        q = q.reshape(-1, site.heads, site.head_size)
        return self.backend.run(q, k, v, None, None, site, static).reshape(-1, call.width)

    # -- in the runner ---------------------------------------------------------------------------------------------

    def take_over(self, capture: contextlib.ExitStack) -> None:
        """From now on SGLang's attention prepares nothing for prefill graphs.

        Args:
            capture: ends with the capture, and what is changed for its time with it.
        """
        runner, attention = self.runner, self.runner.model_runner.attn_backend
        host_plan.remove(prefill_attention(attention))
        self.let_go()
        capture.enter_context(replaced(attention, "init_forward_metadata_out_graph", lambda *a, **k: None))
        # Newer releases ask when the batch's shared memory was read for the last time: the graph reads it to its end.
        ends = find(READ_ENDS)
        unknown, prepare = None if ends is None else ends.UNKNOWN, runner._prepare_forward_metadata_for_replay

        loaded = defer(runner)

        def prepared(batch: Any, static_batch: Any, shape: Any) -> Any:
            loaded()
            size = int(getattr(shape, "size", shape))
            return unknown if self.reads(size) else prepare(batch, static_batch, shape)

        runner._prepare_forward_metadata_for_replay = prepared

    def reads(self, bucket: int) -> bool:
        """Whether a bucket's graph is one that we attend in."""
        backend = self.runner.backend
        if not getattr(type(backend), "ours", False) or bucket in backend.sglangs:
            return False
        # A later capture may have gone another way.
        return self.backend is not None and backend.session.own is self

    def let_go(self) -> None:
        """Let go of what SGLang's attention keeps for graphs, as it attends in none; it would make it anew."""
        attention = prefill_attention(self.runner.model_runner.attn_backend)
        for name in _FLASHINFER:
            if getattr(attention, name, None) is not None:
                setattr(attention, name, None)
