"""One set of captured graphs: its static buffers, and a graph for each token bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullgraph_compile.arguments import weights_of
from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.bucket import Bucket, Inputs, Outputs, Rows, address_count, view
from fullgraph_compile.caller_rows import CallerRows, recordable
from fullgraph_compile.dispatch import Limits
from fullgraph_compile.graphs import GraphRecorder
from fullgraph_compile.ladder import capture_lengths, slots_of
from fullgraph_compile.program import Program
from fullgraph_compile.progress import steps
from fullgraph_compile.staging import Poison, StaticBuffers
from fullgraph_compile.weight_memory import WeightMemory

if TYPE_CHECKING:
    from fullgraph_compile.cache import PagedKVCache


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
        args: values of the placeholders: weights, and tensors without a token dim; of the others dtype and shape.
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
        self.buffers = StaticBuffers(device, buckets, limits.context_length, cache, address_count(inputs, outputs))
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
            self.fetch(bucket)
            results = self.program.run(values, bucket.static)
            for buffer, result in zip(bucket.outputs, results, strict=True):
                buffer.copy_(result)
            self.bring(bucket)

        return run

    def fetch(self, bucket: Bucket) -> None:
        """What a run of the bucket begins with: the inputs of the call that is staged."""
        if self._recordable:
            bucket.fetches.copy()

    def bring(self, bucket: Bucket) -> None:
        """What a run of the bucket ends with: its outputs are copied to where the call that is staged gets its own."""
        if self._recordable:
            bucket.brings.copy()

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
        self._values = {
            i: torch.empty(args[i].shape, dtype=args[i].dtype, device=self.device).copy_(args[i])
            for i in self.inputs.values
        }
        self._recordable = recordable(self.device)
        # Outputs that have a token dim.
        self._brought = [i for i, (_, dim) in enumerate(self.outputs) if dim is not None]
        self.storages = frozenset(s.untyped_storage().data_ptr() for s in outputs)
        for tokens in ladder:
            static = self.buffers.of(tokens)
            given = {i: view(inputs[i], t, dim, tokens) for i, (t, dim) in examples.items()}
            made = [view(s, fake, dim, tokens) for s, (fake, dim) in zip(outputs, self.outputs, strict=True)]
            addresses, real = self.buffers.addresses_of(tokens), static.num_real_tokens
            first, last = addresses[: len(given)], addresses[len(given) :]
            fetches = CallerRows(list(given.values()), list(self.inputs.tokens.values()), first, real, fetch=True)
            rows = [dim for _, dim in self.outputs if dim is not None]
            brings = CallerRows([made[i] for i in self._brought], rows, last, real, fetch=False)
            self.buckets[tokens] = Bucket(tokens, static, given, made, fetches, brings)

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

    def replay(
        self,
        tokens: int,
        args: Sequence[Any],
        batch: PrefillBatch,
        poison: Poison | None,
        *,
        owned: bool = False,
    ) -> list[Tensor]:
        """Stage a batch and launch its bucket's graph.

        Args:
            owned: whether outputs that have a token dim are to be the caller's own.

        Returns:
            The body's outputs, cut to real rows: views of buffers that the next call overwrites, but for the caller's
            own.
        """
        bucket = self.buckets[tokens]
        assert bucket.graph is not None
        outputs, sources = self.stage(tokens, args, batch, poison, owned=owned and self._recordable)
        bucket.graph.replay()
        del sources  # not before the launch: its memory is whose comes next on this stream
        if owned and not self._recordable:
            return [t if dim is None else t.clone() for t, (_, dim) in zip(outputs, self.outputs, strict=True)]
        return outputs

    def stage(
        self,
        tokens: int,
        args: Sequence[Any],
        batch: PrefillBatch,
        poison: Poison | None,
        *,
        owned: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Write a batch, and where its inputs lie and its outputs go, into what the bucket's graph reads.

        Args:
            owned: whether the graph brings the outputs to memory of their own.

        Returns:
            The outputs that the graph will make, and the tensors that it fetches its inputs from, to be kept until it
            is launched.

        Raises:
            ValueError: an input has not one row for each token, or is of another dtype; nothing is written.
        """
        bucket = self.buckets[tokens]
        rows = bucket.rows.get(batch.tokens)
        if rows is None:
            rows = bucket.rows[batch.tokens] = self._rows_of(bucket, batch.tokens)
        sources, addresses = [], []
        for i, shape, dtype, lazy in rows.inputs:
            source = args[i]
            if source.shape != shape or source.dtype != dtype:
                what = f"input {i} is {list(source.shape)} of {source.dtype}"
                raise ValueError(f"{what} for {batch!r}; it must be {list(shape)} of {dtype}")
            if lazy:
                source = source.resolve_conj().resolve_neg()
            if source.device != self.device or not source.is_contiguous():
                source = source.to(self.device, non_blocking=_unpinned(source)).contiguous()
            sources.append(source)
            addresses.append(source.data_ptr())
        outputs = list(rows.outputs)
        for i in self._brought:
            if owned:
                # Contiguous, as the rows of a contiguous one are dense but for what lies between them; a quarter of
                # the time that ``new_empty`` takes.
                outputs[i] = own = torch.empty_like(outputs[i])
                addresses.append(own.data_ptr())
            else:
                addresses.append(0)
        if poison is not None:
            self._poison(poison, [*bucket.inputs.values(), *bucket.outputs, *outputs])
        static = self.buffers.stage(batch, tokens, poison, addresses)
        if self._values:
            given = [args[i] for i in self._values]
            torch._foreach_copy_([*self._values.values()], given, non_blocking=all(map(_unpinned, given)))
        if not self._recordable:
            self._copy_rows(bucket, sources, batch.tokens)
        if self.program.plans:
            self.program.plan(batch, static)
        return outputs, sources

    def _rows_of(self, bucket: Bucket, tokens: int) -> Rows:
        return Rows(
            [
                (i, t.narrow(dim, 0, tokens).shape, t.dtype, t.is_floating_point() or t.is_complex())
                for (i, t), dim in zip(bucket.inputs.items(), self.inputs.tokens.values(), strict=True)
            ],
            [
                buffer if dim is None else buffer.narrow(dim, 0, tokens)
                for buffer, (_, dim) in zip(bucket.outputs, self.outputs, strict=True)
            ],
        )

    def _copy_rows(self, bucket: Bucket, sources: Sequence[Tensor], tokens: int) -> None:
        """What the graph does itself where it can be recorded."""
        for (i, dim), source in zip(self.inputs.tokens.items(), sources, strict=True):
            inputs = bucket.inputs[i]
            inputs.narrow(dim, 0, tokens).copy_(source)
            inputs.narrow(dim, tokens, bucket.tokens - tokens).zero_()

    def relaunch(self, tokens: int) -> Callable[[], None]:
        """What launches the bucket's graph by itself, again and again, on the metadata and inputs that it has now.

        The caller's inputs may be gone by then, so the graph gets a copy of its own until the next call is staged.
        """
        bucket = self.buckets[tokens]
        graph = bucket.graph
        assert graph is not None
        real = int(bucket.static.num_real_tokens)
        rows = [bucket.inputs[i].narrow(dim, 0, real) for i, dim in self.inputs.tokens.items()]
        bucket.kept = [t.clone(memory_format=torch.contiguous_format) for t in rows]
        bucket.fetches.addresses.copy_(torch.tensor([t.data_ptr() for t in bucket.kept]))
        bucket.brings.addresses.zero_()  # the result of that call is the caller's
        return lambda: graph.replay()

    @staticmethod
    def _poison(poison: Poison, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
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


def _unpinned(tensor: Tensor) -> bool:
    """Whether the caller may write to the tensor after a copy to a device that was not waited for: of pinned memory the
    device reads later, of other memory the host itself, before it goes on."""
    return tensor.device.type != "cpu" or not tensor.is_pinned()
