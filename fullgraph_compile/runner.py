"""Decide, replay or run at exact size, and notice what changed: the captured body."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.bucket import Bucket, Inputs, Outputs
from fullgraph_compile.capture import CaptureSet
from fullgraph_compile.dispatch import Decision, Limits, Reason, Route, decide
from fullgraph_compile.fitting import Fitting, fit
from fullgraph_compile.graphs import GraphRecorder
from fullgraph_compile.program import Program
from fullgraph_compile.report import Report, log
from fullgraph_compile.staging import ExactBuffers, Poison

if TYPE_CHECKING:
    from fullgraph_compile.cache import PagedKVCache


class WeightsChanged(Exception):
    """A weight has another dtype or shape than the one that was traced, so the trace is of no use."""


class BodyRunner:
    """Runs one compiled body: by graph where a bucket fits, else by the same pieces at exact sizes.

    Calls are serialised by a lock, and ordered on the device, as all of them share the static buffers.

    Args:
        program: the compiled body.
        inputs: what its placeholders are.
        outputs: its outputs.
        limits: what the graphs may serve; its ladder holds legal buckets only.
        recorder: how graphs are recorded; None = never.
        device: where the body runs.
        report: counts and timings go there.
        fitting: what decides on the ladder at the first capture; None = it is captured as it is.

    Attributes:
        poison: what static buffers are filled with before each staging; for tests.
    """

    # Graphs keep addresses, so each KV cache, and each module that shares the trace, needs its own.
    MOST_SETS = 2

    def __init__(
        self,
        program: Program,
        inputs: Inputs,
        outputs: Outputs,
        limits: Limits,
        recorder: GraphRecorder | None,
        device: torch.device,
        report: Report,
        *,
        clone_outputs: bool = True,
        show_progress: bool = False,
        fitting: Fitting | None = None,
    ) -> None:
        self.program = program
        self.inputs = inputs
        self.outputs = list(outputs)
        self.limits = limits
        self.recorder = recorder
        self.device = device
        self.report = report
        self.clone_outputs = clone_outputs
        self.show_progress = show_progress
        self.fitting = fitting
        self.lock = threading.RLock()
        self.poison: Poison | None = None
        self._exact_buffers = ExactBuffers(device)
        self._sets: list[CaptureSet] = []  # the last used first
        self._last_stream: torch.cuda.Stream | None = None
        self._cuda_index = (device.index or 0) if device.type == "cuda" else None

    # -- running -------------------------------------------------------------------------------------------------

    def decide(self, batch: PrefillBatch) -> Decision:
        """Route, bucket and reason for a batch; touches nothing."""
        limits = self.limits if batch.cache is None else self.limits_over(batch.cache)
        return decide(batch.tokens, batch.requests, batch.longest, limits)

    def limits_over(self, cache: PagedKVCache | None) -> Limits:
        """What the graphs may serve over a KV cache."""
        return self.limits if cache is None else self.limits.over_cache(cache.capacity)

    def run(
        self, args: Sequence[Any], batch: PrefillBatch, decision: Decision | None = None, *, owned: bool = False
    ) -> tuple[list[Tensor], Decision]:
        """Outputs of the body, cut to real rows, and how they came about.

        Outputs of a replay are views of buffers that the next call overwrites; ``self.owned`` copies them.

        Args:
            decision: what ``decide`` says of the batch, if it was asked.
            owned: whether those that have a token dim are to be the caller's own at once.

        Raises:
            ValueError: the body cannot use the batch's KV cache.
        """
        with self.lock:
            if decision is None:
                decision = self.decide(batch)
            graphs = self._set_for(batch.cache) if decision.route is Route.GRAPH else None
            if graphs is None:
                self.program.check_cache(batch.cache, self.device)
                if decision.route is Route.GRAPH:
                    graphs = self.capture(args, batch.cache)
                    decision = self.decide(batch)  # what failed is turned off
            self._follow_last_call()
            if decision.route is Route.GRAPH and graphs is not None:
                return self._replay(graphs, args, batch, decision, owned)
            return self.exact(args, batch), decision

    def _replay(
        self, graphs: CaptureSet, args: Sequence[Any], batch: PrefillBatch, decision: Decision, owned: bool
    ) -> tuple[list[Tensor], Decision]:
        bucket = decision.bucket
        assert bucket is not None
        try:
            outputs = graphs.replay(bucket, args, batch, self.poison, owned=owned)
            if not graphs.weights_moved(args):
                return outputs, decision
            # The launch read memory that is not this call's weights: its result is dropped.
            for other in self._sets:
                if other.over(batch.cache) and not other.weights_moved(args):
                    self._sets.remove(other)
                    self._sets.insert(0, other)
                    return other.replay(bucket, args, batch, self.poison, owned=owned), decision
        except Exception as error:
            self.raise_if_lost(error)
            # Where this fails too it is the call that is wrong, as with a token id that the model has no row for.
            exact = self.exact(args, batch)
            self._turn_off(bucket, Reason.REPLAY_FAILED, error)
            return exact, self.decide(batch)
        outputs = self.exact(args, batch)
        self.capture(args, batch.cache)
        return outputs, Decision(Route.COMPILED, bucket, Reason.WEIGHTS_MOVED)

    def _set_for(self, cache: PagedKVCache | None) -> CaptureSet | None:
        """The set over this cache that was used last."""
        for graphs in self._sets:
            # Without a cache as ``over`` has it, but without a step: this is before each launch.
            if graphs.cache is None if cache is None else graphs.over(cache):
                return graphs
        return None

    def exact(self, args: Sequence[Any], batch: PrefillBatch) -> list[Tensor]:
        """The same compiled pieces without padding and without a graph.

        Raises:
            WeightsChanged: a weight is not of the form that the pieces were compiled for.
        """
        for i, form in self.inputs.forms.items():
            if (args[i].dtype, args[i].shape) != form:
                raise WeightsChanged(f"a weight is {args[i].dtype} {tuple(args[i].shape)} now, it was {form[0]}")
        if batch.tokens == 0:
            return [self._empty(fake, dim) for fake, dim in self.outputs]
        static = self._exact_buffers.stage(batch)
        values = list(args)
        for i in self.inputs.values:
            values[i] = args[i].to(self.device)
        self.program.plan(batch, static)
        return self.program.run(values, static)

    def _empty(self, fake: Tensor, dim: int | None) -> Tensor:
        shape = [0 if d == dim else int(s) for d, s in enumerate(fake.shape)]
        return torch.zeros(shape, dtype=fake.dtype, device=self.device)

    def owned(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or a copy of it if it is memory that the next call overwrites."""
        if self.clone_outputs:
            storage = tensor.untyped_storage().data_ptr()
            for graphs in self._sets:
                if storage in graphs.storages:
                    return tensor.clone()
        return tensor

    def _follow_last_call(self) -> None:
        """Wait, on the device, for the last call if it ran on another stream: both use the static buffers."""
        if self._cuda_index is None:
            return
        # By its handle, as to make the object of a stream takes longer than to launch a graph.
        handle = torch._C._cuda_getCurrentRawStream(self._cuda_index)
        if self._last_stream is not None and self._last_stream.cuda_stream == handle:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    # -- capturing -----------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> dict[int, Bucket]:
        """The captured buckets of the set that was used last."""
        return self._sets[0].buckets if self._sets else {}

    def relaunch(self, bucket: int) -> Callable[[], None]:
        """What launches the graph of a bucket of that set without a call, on what it was last called with."""
        return self._sets[0].relaunch(bucket)

    def capture(self, args: Sequence[Any], cache: PagedKVCache | None = None) -> CaptureSet | None:
        """Warm up and capture every bucket.  A bucket that fails is turned off with its reason; the others work.

        Args:
            args: values of the placeholders.
            cache: the KV cache that the graphs will read and write.

        Returns:
            The captured set; None where nothing is recorded.
        """
        limits = self.limits_over(cache)
        if self.recorder is None or not limits.ladder:
            return None
        self.program.prepare(args)
        start, free = time.perf_counter(), self._free_bytes()
        while len(self._sets) >= self.MOST_SETS:
            self._sets.pop().close()
        if self.fitting is not None:
            with self.lock, torch.inference_mode(False), torch.no_grad():
                self.limits = fit(self, self.fitting, args, cache)
            self.fitting = None
            limits = self.limits_over(cache)
            if not limits.ladder:
                self.report.ready = True
                self.report.capture_seconds += time.perf_counter() - start
                return None
        with self.lock, torch.inference_mode(False), torch.no_grad(), self.recorder.session():
            graphs = CaptureSet(self.program, self.inputs, self.outputs, limits, self.device, cache, args)
            failed = graphs.capture(self.recorder, args, show_progress=self.show_progress)
        for tokens, error in failed.items():
            self.raise_if_lost(error)
            self._turn_off(tokens, Reason.CAPTURE_FAILED, error)
        self._sets.insert(0, graphs)
        off = dict(self.limits.off)
        self.report.buckets = tuple(b for b in limits.ladder if b not in off)
        self.report.ready = True
        self.report.capture_seconds += time.perf_counter() - start
        self.report.graph_bytes += max(0, free - self._free_bytes())
        return graphs

    def _turn_off(self, tokens: int, reason: Reason, error: BaseException) -> None:
        log.warning("%s: bucket %d is turned off: %s: %s", self.report.name, tokens, reason.value, error)
        self.report.details.setdefault(reason, f"bucket {tokens}: {error}")
        self.limits = replace(self.limits, off=(*self.limits.off, (tokens, reason)))
        self.report.buckets = tuple(b for b in self.report.buckets if b != tokens)

    def raise_if_lost(self, error: Exception) -> None:
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
            for graphs in self._sets:
                graphs.close()
            self._sets.clear()
            self.limits = replace(self.limits, off=())
            self.report.buckets = ()
            self.report.ready = False
            self.report.graph_bytes = 0
