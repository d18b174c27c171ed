"""Decide, stage, replay: the captured body."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.dispatch import Decision, Limits, Reason, Route, decide
from fullgraph_compile.graphs import GraphRecorder, RecordedGraph
from fullgraph_compile.ladder import capture_lengths, slots_of
from fullgraph_compile.program import Program
from fullgraph_compile.progress import steps
from fullgraph_compile.report import Report, log
from fullgraph_compile.staging import Poison, StaticBuffers


@dataclass(frozen=True)
class Inputs:
    """What each placeholder of the body is, by index.

    Attributes:
        sizes: the token count itself.
        tokens: index -> token dim, for tensors that are padded to the bucket.
        weights: parameters and buffers; a graph keeps their addresses.
        values: other tensors, copied into static buffers at each call.
    """

    sizes: tuple[int, ...]
    tokens: dict[int, int]
    weights: tuple[int, ...]
    values: tuple[int, ...]


@dataclass
class _Bucket:
    """One captured size: its static inputs, metadata, outputs, and its graph."""

    tokens: int
    static: StaticBatch
    inputs: dict[int, Tensor]
    outputs: list[Tensor]
    graph: RecordedGraph | None = None
    rows: dict[int, _Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rows:
    """The first rows of a bucket's inputs and outputs, made once for each token count: a view costs as much as a
    small copy."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class BodyRunner:
    """Runs one compiled body: by graph where a bucket fits, else by the same pieces at exact sizes.

    Calls are serialised by a lock and ordered on the device by an event, as all of them share the static buffers.

    Args:
        program: the compiled body.
        inputs: what its placeholders are.
        outputs: fake outputs of the body with their token dims.
        limits: what the graphs may serve; its ladder holds legal buckets only.
        recorder: how graphs are recorded; None = never.
        device: where the body runs.
        report: counts and timings go there.
    """

    WARM_UPS = 2

    def __init__(
        self,
        program: Program,
        inputs: Inputs,
        outputs: Sequence[tuple[Tensor, int | None]],
        limits: Limits,
        recorder: GraphRecorder | None,
        device: torch.device,
        report: Report,
        *,
        clone_outputs: bool = True,
        show_progress: bool = False,
    ) -> None:
        self.program = program
        self.inputs = inputs
        self.limits = limits
        self.recorder = recorder
        self.device = device
        self.report = report
        self.clone_outputs = clone_outputs
        self.show_progress = show_progress
        self.buffers = StaticBuffers(device)
        self.lock = threading.RLock()
        self.outputs = list(outputs)
        self._buckets: dict[int, _Bucket] = {}
        self._values: dict[int, Tensor] = {}
        self._pointers: list[int] = []
        self._storages: frozenset[int] = frozenset()
        self._captured = False
        self._last_stream: torch.cuda.Stream | None = None
        self._dirty: dict[int, int] = {}

    # -- deciding ------------------------------------------------------------------------------------------------

    def decide(self, batch: PrefillBatch) -> Decision:
        """Route, bucket and reason for a batch; touches nothing."""
        return decide(batch.tokens, batch.requests, batch.longest, self.limits)

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, args: Sequence[Any], batch: PrefillBatch) -> tuple[list[Tensor], Decision]:
        """Outputs of the body, cut to real rows, and how they came about.

        Outputs of a replay are views of buffers that the next call overwrites.
        """
        with self.lock:
            decision = self.decide(batch)
            if decision.route is Route.GRAPH and not self._captured:
                self.capture(args)
                decision = self.decide(batch)
            self._follow_last_call()
            if decision.route is Route.GRAPH:
                outputs, decision = self._replay(self._buckets[decision.bucket or 0], args, batch, decision)
            else:
                outputs = self._exact(args, batch)
            return outputs, decision

    def _replay(
        self, bucket: _Bucket, args: Sequence[Any], batch: PrefillBatch, decision: Decision
    ) -> tuple[list[Tensor], Decision]:
        assert bucket.graph is not None
        try:
            self._stage(bucket, args, batch)
            bucket.graph.replay()
        except RuntimeError as error:
            self._raise_if_lost(error)
            self._turn_off(bucket.tokens, Reason.REPLAY_FAILED, error)
            return self._exact(args, batch), self.decide(batch)
        if self._weight_pointers(args) != self._pointers:
            # The launch read memory that is no longer the weight's: its result is dropped, not returned.
            self.release()
            return self._exact(args, batch), Decision(Route.COMPILED, bucket.tokens, Reason.WEIGHTS_MOVED)
        return list(bucket.rows[batch.tokens].outputs), decision

    def _weight_pointers(self, args: Sequence[Any]) -> list[int]:
        return list(map(Tensor.data_ptr, map(args.__getitem__, self.inputs.weights)))

    def _exact(self, args: Sequence[Any], batch: PrefillBatch) -> list[Tensor]:
        """The same compiled pieces without padding and without a graph."""
        if batch.tokens == 0:
            return [self._empty(fake, dim) for fake, dim in self.outputs]
        static = self.buffers.exact(batch)
        values = list(args)
        for i in self.inputs.values:
            values[i] = args[i].to(self.device)
        self.program.attention.plan(batch, static)
        return self.program.run(values, static)

    def _empty(self, fake: Tensor, dim: int | None) -> Tensor:
        shape = [0 if d == dim else int(s) for d, s in enumerate(fake.shape)]
        return torch.zeros(shape, dtype=fake.dtype, device=self.device)

    def owned(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or a copy of it if it is memory that the next call overwrites."""
        if self.clone_outputs and tensor.untyped_storage().data_ptr() in self._storages:
            return tensor.clone()
        return tensor

    # -- staging -------------------------------------------------------------------------------------------------

    def _stage(self, bucket: _Bucket, args: Sequence[Any], batch: PrefillBatch) -> None:
        """Write a batch into what the bucket's graph reads; every padded row is rewritten too."""
        static = self.buffers.stage(batch, bucket.tokens)
        if self.buffers.poison is not None:
            self._poison(bucket, self.buffers.poison)
        rows = bucket.rows.get(batch.tokens)
        if rows is None:
            rows = bucket.rows[batch.tokens] = self._first_rows(bucket, batch.tokens)
        to, source = [*rows.inputs, *self._values.values()], [args[i] for i in (*self.inputs.tokens, *self._values)]
        torch._foreach_copy_(to, source, non_blocking=True)
        for i, dim in self.inputs.tokens.items():
            self._zero_padded_rows(i, bucket, dim, batch.tokens)
        self.program.attention.plan(batch, static)

    def _first_rows(self, bucket: _Bucket, tokens: int) -> _Rows:
        return _Rows(
            [bucket.inputs[i].narrow(dim, 0, tokens) for i, dim in self.inputs.tokens.items()],
            [
                buffer if dim is None else buffer.narrow(dim, 0, tokens)
                for buffer, (_, dim) in zip(bucket.outputs, self.outputs, strict=True)
            ],
        )

    def _zero_padded_rows(self, i: int, bucket: _Bucket, dim: int, tokens: int) -> None:
        """Rows past the real total are zeros; those that no earlier call has written still are."""
        buffer = bucket.inputs[i]
        # The buckets share a storage, where a row of one is the same row of another unless a dim comes before it.
        written = self._dirty[i] if buffer.shape[:dim].numel() == 1 else bucket.tokens
        last = min(written, bucket.tokens)
        if tokens < last:
            buffer.narrow(dim, tokens, last - tokens).zero_()
        self._dirty[i] = written if written > bucket.tokens else tokens

    def _poison(self, bucket: _Bucket, poison: Poison) -> None:
        self._dirty = dict.fromkeys(self._dirty, self.limits.ladder[-1])
        for tensor in (*bucket.inputs.values(), *bucket.outputs):
            if tensor.is_floating_point():
                tensor.fill_(float("nan") if poison is Poison.IMPOSSIBLE else 1.0)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max if poison is Poison.IMPOSSIBLE else 1)

    def _follow_last_call(self) -> None:
        """Wait, on the device, for the last call if it ran on another stream: both use the static buffers."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    # -- capturing -----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._captured

    def capture(self, args: Sequence[Any]) -> None:
        """Warm up every bucket, then capture every bucket, largest first.

        Nothing grows, rebinds or is made lazily after that.  A bucket that fails is turned off with its reason; the
        others work.

        Args:
            args: values of the placeholders; only weights, and the shapes of other tensors, are used.
        """
        if self.recorder is None or self._captured:
            return
        start, free = time.perf_counter(), self._free_bytes()
        with self.lock, torch.inference_mode(False), torch.no_grad(), self.recorder.session():
            self._pointers = self._weight_pointers(args)
            self._allocate(args)
            largest_first = sorted(self._buckets.values(), key=lambda b: -b.tokens)
            for bucket in steps(largest_first, "warming up", show=self.show_progress):
                self._attempt(bucket, args, record=False)
            for bucket in steps(largest_first, "capturing", show=self.show_progress):
                if bucket.tokens not in dict(self.limits.off):
                    self._attempt(bucket, args, record=True)
        self._captured = True
        self.report.buckets = tuple(b for b in self.limits.ladder if self._buckets[b].graph is not None)
        self.report.ready = True
        self.report.capture_seconds += time.perf_counter() - start
        self.report.graph_bytes = max(0, free - self._free_bytes())

    def _attempt(self, bucket: _Bucket, args: Sequence[Any], *, record: bool) -> None:
        """Warm up or record one bucket on a legal batch that fills it."""
        lengths = capture_lengths(bucket.tokens, self.limits.context_length, self.limits.slots)
        assert lengths is not None, "the ladder holds legal buckets only"
        batch = PrefillBatch(lengths, device=self.device)
        values: list[Any] = list(args)
        for i in self.inputs.sizes:
            values[i] = bucket.tokens
        for i, tensor in (*bucket.inputs.items(), *self._values.items()):
            values[i] = tensor

        def run() -> None:
            results = self.program.run(values, bucket.static)
            for buffer, result in zip(bucket.outputs, results, strict=True):
                buffer.copy_(result)

        try:
            self.program.attention.plan(batch, self.buffers.stage(batch, bucket.tokens))
            if record:
                assert self.recorder is not None
                bucket.graph = self.recorder.record(run)
            else:
                for _ in range(self.WARM_UPS):
                    run()
        except RuntimeError as error:
            self._raise_if_lost(error)
            self._turn_off(bucket.tokens, Reason.CAPTURE_FAILED, error)

    def _allocate(self, args: Sequence[Any]) -> None:
        """Static buffers of all buckets; the buckets share one storage for each input and each output.

        A bucket's view starts at the storage's begin and is contiguous, whatever the token dim, so its strides are
        those of a call of that size.
        """
        ladder, slots = self.limits.ladder, self.limits.slots
        examples = {i: (args[i], dim) for i, dim in self.inputs.tokens.items()}
        inputs = {i: self._storage(t, dim, ladder[-1]) for i, (t, dim) in examples.items()}
        self._dirty = dict.fromkeys(inputs, 0)
        outputs = [self._storage(fake, dim, ladder[-1]) for fake, dim in self.outputs]
        self._values = {
            i: torch.empty(args[i].shape, dtype=args[i].dtype, device=self.device).copy_(args[i])
            for i in self.inputs.values
        }
        self._storages = frozenset(s.untyped_storage().data_ptr() for s in outputs)
        for tokens in ladder:
            static = self.buffers.add(tokens, slots_of(tokens, slots), self.limits.context_length)
            self._buckets[tokens] = _Bucket(
                tokens,
                static,
                {i: _view(inputs[i], t, dim, tokens) for i, (t, dim) in examples.items()},
                [_view(s, fake, dim, tokens) for s, (fake, dim) in zip(outputs, self.outputs, strict=True)],
            )

    def _storage(self, like: Tensor, dim: int | None, tokens: int) -> Tensor:
        size = 1
        for d, s in enumerate(like.shape):
            size *= tokens if d == dim else int(s)
        return torch.zeros(size, dtype=like.dtype, device=self.device)

    def _turn_off(self, tokens: int, reason: Reason, error: BaseException) -> None:
        log.warning("%s: bucket %d is turned off: %s: %s", self.report.name, tokens, reason.value, error)
        self.report.details.setdefault(reason, f"bucket {tokens}: {error}")
        self.limits = replace(self.limits, off=(*self.limits.off, (tokens, reason)))
        self.report.buckets = tuple(b for b in self.report.buckets if b != tokens)

    def _raise_if_lost(self, error: RuntimeError) -> None:
        """Re-raise where the CUDA context is gone: nothing that runs after it could be trusted."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                raise error from None

    def _free_bytes(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]

    def release(self) -> None:
        """Free the graphs and the static buffers; the next call that fits captures again, without compiling."""
        with self.lock:
            for bucket in self._buckets.values():
                if bucket.graph is not None:
                    bucket.graph.close()
            self._buckets.clear()
            self._values.clear()
            self._dirty.clear()
            self._storages = frozenset()
            poison, self.buffers = self.buffers.poison, StaticBuffers(self.device)
            self.buffers.poison = poison
            self.limits = replace(self.limits, off=())
            self._captured = False
            self.report.buckets = ()
            self.report.ready = False
            self.report.graph_bytes = 0


def _view(storage: Tensor, like: Tensor, dim: int | None, tokens: int) -> Tensor:
    shape = [tokens if d == dim else int(s) for d, s in enumerate(like.shape)]
    size = 1
    for s in shape:
        size *= s
    return storage[:size].view(shape)
