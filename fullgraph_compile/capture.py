"""One set of captured graphs: its static buffers, and a graph for each token bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullgraph_compile.arguments import weights_of
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.dispatch import Limits
from fullgraph_compile.graphs import GraphRecorder, RecordedGraph
from fullgraph_compile.ladder import capture_lengths, slots_of
from fullgraph_compile.program import Program
from fullgraph_compile.progress import steps
from fullgraph_compile.staging import Poison, StaticBuffers
from fullgraph_compile.weight_memory import WeightMemory

if TYPE_CHECKING:
    from fullgraph_compile.cache import PagedKVCache


@dataclass(frozen=True)
class Inputs:
    """What each placeholder of the body is, by index.

    Attributes:
        sizes: the token count itself.
        tokens: index -> token dim, for tensors that are padded to the bucket.
        weights: parameters and buffers; a graph keeps their addresses.
        values: other tensors, copied into static buffers at each call.
        forms: dtype and shape of each weight as it was traced.
    """

    sizes: tuple[int, ...]
    tokens: dict[int, int]
    weights: tuple[int, ...]
    values: tuple[int, ...]
    forms: dict[int, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)


Outputs = Sequence[tuple[Tensor, int | None]]
"""Fake outputs of the body, each with its token dim, or None where the whole leaf is returned."""


@dataclass(frozen=True)
class Rows:
    """What a call writes, the first rows of a bucket's inputs and all inputs without rows; and what it returns, the
    first rows of its outputs.

    Made once for each token count: a view costs as much as a small copy.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Bucket:
    """One captured size: its static inputs, metadata, outputs, and its graph.

    ``not_alike`` are the inputs, by index, whose rows lie at other places in other buckets.
    """

    tokens: int
    static: StaticBatch
    inputs: dict[int, Tensor]
    outputs: list[Tensor]
    not_alike: frozenset[int]
    graph: RecordedGraph | None = None
    rows: dict[int, Rows] = field(default_factory=dict)


class CaptureSet:
    """Graphs for all buckets over one KV cache, or over none.

    The buckets share one storage for each input and each output.  A bucket's view starts where the storage starts and
    is contiguous, whatever the token dim, so its strides are those of a call of that size.

    Args:
        program: the compiled body.
        inputs: what its placeholders are.
        outputs: its outputs.
        limits: the ladder, which holds legal buckets only, and the bounds that the graphs keep.
        cache: the KV cache whose addresses the graphs keep, or None.
        args: values of the placeholders; only weights, and the shapes of other tensors, are used.
    """

    WARM_UPS = 2

    def __init__(
        self,
        program: Program,
        inputs: Inputs,
        outputs: Outputs,
        limits: Limits,
        device: torch.device,
        cache: PagedKVCache | None,
        args: Sequence[Any],
    ) -> None:
        self.program = program
        self.inputs = inputs
        self.outputs = outputs
        self.limits = limits
        self.device = device
        self.cache = cache
        self._cache_memory = WeightMemory(() if cache is None else (*cache.k, *cache.v))
        buckets = [(tokens, slots_of(tokens, limits.slots)) for tokens in limits.ladder]
        self.buffers = StaticBuffers(device, buckets, limits.context_length, cache)
        self.buckets: dict[int, Bucket] = {}
        self._weights = WeightMemory(weights_of(args, inputs.weights))
        self._allocate(args)

    # -- capturing -----------------------------------------------------------------------------------------------

    def capture(self, recorder: GraphRecorder, args: Sequence[Any], *, show_progress: bool) -> dict[int, Exception]:
        """Warm up every bucket, then capture every bucket, largest first; what failed, by bucket.

        Nothing grows, rebinds or is made lazily after that.
        """
        failed: dict[int, Exception] = {}
        largest_first = sorted(self.buckets.values(), key=lambda b: -b.tokens)
        for phase, make in (("warming up", self._warm_up), ("capturing", self._record)):
            for bucket in steps(largest_first, phase, show=show_progress):
                if bucket.tokens in failed:
                    continue
                try:
                    make(bucket, args, recorder)
                except Exception as error:
                    failed[bucket.tokens] = error
        return failed

    def _warm_up(self, bucket: Bucket, args: Sequence[Any], recorder: GraphRecorder) -> None:
        run = self.run_of(bucket, args)
        for _ in range(self.WARM_UPS):
            run()

    def _record(self, bucket: Bucket, args: Sequence[Any], recorder: GraphRecorder) -> None:
        bucket.graph = recorder.record(self.run_of(bucket, args))

    def run_of(self, bucket: Bucket, args: Sequence[Any]) -> Callable[[], None]:
        """One run of the body on a legal batch that fills the bucket, which is staged now.

        The buckets share one block of metadata, so a run must come before another bucket is staged.
        """
        lengths = capture_lengths(bucket.tokens, self.limits.context_length, self.limits.slots)
        assert lengths is not None, "the ladder holds legal buckets only"
        # With a cache nothing is written, and the keys are those of the reserved page, which belongs to no request.
        batch = PrefillBatch.for_capture(lengths, self.cache, self.device)
        values = self.values_of(bucket, args)
        self.program.plan(batch, self.buffers.stage(batch, bucket.tokens))

        def run() -> None:
            if self.buffers.staged is not bucket.static:
                # Kernels would follow the offsets of another bucket, out of this one's memory.
                raise RuntimeError(f"another bucket was staged after bucket {bucket.tokens}, before its run")
            results = self.program.run(values, bucket.static)
            for buffer, result in zip(bucket.outputs, results, strict=True):
                buffer.copy_(result)

        return run

    def values_of(self, bucket: Bucket, args: Sequence[Any]) -> list[Any]:
        """The placeholders of a run of the bucket: its static inputs, and the weights of ``args``."""
        values: list[Any] = list(args)
        for i in self.inputs.sizes:
            values[i] = bucket.tokens
        for i, tensor in (*bucket.inputs.items(), *self._values.items()):
            values[i] = tensor
        return values

    def _allocate(self, args: Sequence[Any]) -> None:
        ladder = self.limits.ladder
        examples = {i: (args[i], dim) for i, dim in self.inputs.tokens.items()}
        inputs = {i: self._storage(t, dim, ladder[-1]) for i, (t, dim) in examples.items()}
        outputs = [self._storage(fake, dim, ladder[-1]) for fake, dim in self.outputs]
        # Rows of the inputs that a call has written since they were last zeroed.
        self._dirty = 0
        self._values = {
            i: torch.empty(args[i].shape, dtype=args[i].dtype, device=self.device).copy_(args[i])
            for i in self.inputs.values
        }
        # What a call copies into its bucket, by index.
        self._copied = (*self.inputs.tokens, *self._values)
        self.storages = frozenset(s.untyped_storage().data_ptr() for s in outputs)
        for tokens in ladder:
            static = self.buffers.of(tokens)
            self.buckets[tokens] = Bucket(
                tokens,
                static,
                {i: _view(inputs[i], t, dim, tokens) for i, (t, dim) in examples.items()},
                [_view(s, fake, dim, tokens) for s, (fake, dim) in zip(outputs, self.outputs, strict=True)],
                frozenset(i for i, (t, dim) in examples.items() if t.shape[:dim].numel() != 1),
            )

        self._largest = self.buckets[ladder[-1]]

    def _storage(self, like: Tensor, dim: int | None, tokens: int) -> Tensor:
        size = 1
        for d, s in enumerate(like.shape):
            size *= tokens if d == dim else int(s)
        return torch.zeros(size, dtype=like.dtype, device=self.device)

    def static_bytes(self) -> tuple[float, float]:
        """Bytes of the static inputs and outputs: for each row of the largest bucket, and those that have no rows."""
        largest = self._largest
        rows = [largest.inputs[i] for i in self.inputs.tokens]
        fixed = list(self._values.values())
        for buffer, (_, dim) in zip(largest.outputs, self.outputs, strict=True):
            (fixed if dim is None else rows).append(buffer)
        return sum(t.nbytes for t in rows) / largest.tokens, float(sum(t.nbytes for t in fixed))

    # -- replaying -----------------------------------------------------------------------------------------------

    def replay(self, tokens: int, args: Sequence[Any], batch: PrefillBatch, poison: Poison | None) -> list[Tensor]:
        """Stage a batch and launch its bucket's graph.

        Returns:
            The body's outputs, cut to real rows: views of buffers that the next call overwrites.
        """
        bucket = self.buckets[tokens]
        assert bucket.graph is not None
        rows = self.stage(tokens, args, batch, poison)
        bucket.graph.replay()
        return list(rows.outputs)

    def stage(self, tokens: int, args: Sequence[Any], batch: PrefillBatch, poison: Poison | None) -> Rows:
        """Write a batch and its inputs into what the bucket's graph reads; returns the rows that are real."""
        bucket = self.buckets[tokens]
        rows = bucket.rows.get(batch.tokens)
        if rows is None:
            rows = bucket.rows[batch.tokens] = self._first_rows(bucket, batch.tokens)
        static = self.buffers.stage(batch, tokens, poison)
        if poison is not None:
            self._poison(bucket, poison)
        torch._foreach_copy_(rows.inputs, [args[i] for i in self._copied], non_blocking=True)
        if batch.tokens != self._dirty or bucket.not_alike:
            self._zero_padded_rows(bucket, batch.tokens)
        if self.program.plans:
            self.program.plan(batch, static)
        return rows

    def _first_rows(self, bucket: Bucket, tokens: int) -> Rows:
        return Rows(
            [
                *[bucket.inputs[i].narrow(dim, 0, tokens) for i, dim in self.inputs.tokens.items()],
                *self._values.values(),
            ],
            [
                buffer if dim is None else buffer.narrow(dim, 0, tokens)
                for buffer, (_, dim) in zip(bucket.outputs, self.outputs, strict=True)
            ],
        )

    def _zero_padded_rows(self, bucket: Bucket, tokens: int) -> None:
        """Rows past the real total are zeros; those that no earlier call has written still are."""
        for i, dim in self.inputs.tokens.items():
            # The buckets share a storage, where a row of one is the same row of another unless a dim comes before it:
            # so the rows that a call of a larger bucket has written are zeroed too, once for all that follow.
            inputs, last = self._largest.inputs[i], self._dirty
            if i in bucket.not_alike:
                inputs, last = bucket.inputs[i], bucket.tokens
            if tokens < last:
                inputs.narrow(dim, tokens, last - tokens).zero_()
        self._dirty = tokens

    def _poison(self, bucket: Bucket, poison: Poison) -> None:
        self._dirty = self.limits.ladder[-1]
        for tensor in (*bucket.inputs.values(), *bucket.outputs):
            if tensor.is_floating_point():
                tensor.fill_(float("nan") if poison is Poison.IMPOSSIBLE else 1.0)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max if poison is Poison.IMPOSSIBLE else 1)

    def over(self, cache: PagedKVCache | None) -> bool:
        """Whether the graphs read and write the memory that this KV cache has now."""
        if cache is None or self.cache is None:
            return cache is self.cache
        return self._cache_memory.same((*cache.k, *cache.v))

    def weights_moved(self, args: Sequence[Any]) -> bool:
        """Whether a weight has other memory than the graphs read."""
        return not self._weights.same(weights_of(args, self.inputs.weights))

    def close(self) -> None:
        """Free the graphs."""
        for bucket in self.buckets.values():
            if bucket.graph is not None:
                bucket.graph.close()
        self.buckets.clear()


def _view(storage: Tensor, like: Tensor, dim: int | None, tokens: int) -> Tensor:
    shape = [tokens if d == dim else int(s) for d, s in enumerate(like.shape)]
    size = 1
    for s in shape:
        size *= s
    return storage[:size].view(shape)
