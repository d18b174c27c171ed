"""The body captured in pieces, with attention run eagerly between them: what breakable graphs do, for comparison.

It is the same compiled body, the same attention backend and the same padding as the whole graph, so that what differs
is one launch against many.  Attention's result is copied to where the next piece reads it, one launch a site more than
an engine needs whose attention writes there itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention.kv_write import write_site
from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.capture import CaptureSet
from fullgraph_compile.graphs import GraphRecorder, RecordedGraph
from fullgraph_compile.ladder import capture_lengths
from fullgraph_compile.passes.split_pieces import PieceCall
from fullgraph_compile.runner import BodyRunner


@dataclass(frozen=True)
class _Attention:
    """One attention call between two pieces.

    Attributes:
        operands: q, k, v, sinks and slopes, in memory that the piece before it writes.
        out: where the next piece reads its result.
    """

    site: int
    operands: tuple[Tensor | None, ...]
    out: Tensor


class PiecewiseBucket:
    """One token bucket as a graph for each piece.

    Args:
        runner: of a body that was compiled.
        recorder: records the pieces; not the runner's, whose graphs would keep these alive.
        tokens: rows of the bucket.
        args: values of the placeholders, of any token count.
    """

    def __init__(self, runner: BodyRunner, recorder: GraphRecorder, tokens: int, args: Sequence[Any]) -> None:
        self.runner = runner
        self.recorder = recorder
        self.tokens = tokens
        limits = replace(runner.limits, ladder=(tokens,), off=())
        self.set = CaptureSet(runner.program, runner.inputs, runner.outputs, limits, runner.device, None, args)
        self.bucket = self.set.buckets[tokens]
        self.steps: list[RecordedGraph | _Attention] = []
        lengths = capture_lengths(tokens, limits.context_length, limits.slots)
        assert lengths is not None
        batch = PrefillBatch.for_capture(lengths, None, runner.device)
        runner.program.plan(batch, self.set.buffers.stage(batch, tokens))
        with torch.inference_mode(False), torch.no_grad(), recorder.session():
            self._record(args)

    def _record(self, args: Sequence[Any]) -> None:
        program, recorder = self.runner.program, self.recorder
        warm = self.set.run_of(self.bucket, args)
        warm(), warm()
        values = program.joined(self.set.values_of(self.bucket, args))
        values += [None] * (program.pieces.slots - len(values))
        calls = [step for step in program.pieces.steps if isinstance(step, PieceCall)]
        for step in program.pieces.steps:
            if not isinstance(step, PieceCall):
                operands = tuple(None if i is None else values[i] for i in step.inputs)
                out = values[step.output] = self._attend(step.site, operands).clone()
                self.steps.append(_Attention(step.site, operands, out))
                continue
            piece, inputs = program.compiled[step.kind], [values[i] for i in step.inputs]
            results: list[Tensor] = []

            def run(
                piece: Callable[..., Any] = piece,
                inputs: list[Any] = inputs,
                results: list[Tensor] = results,
                slots: tuple[int, ...] = tuple(step.outputs),
                first: bool = step is calls[0],
                final: bool = step is calls[-1],
            ) -> None:
                if first:
                    self.set.fetch(self.bucket)
                # Kept, so that their memory is nobody else's in the pool: the next piece reads it there.
                for i, result in enumerate(piece(*inputs)):
                    if i < len(results):
                        results[i].copy_(result)
                    else:
                        results.append(result)
                if final:
                    values_now = dict(zip(slots, results, strict=True))
                    for buffer, slot in zip(self.bucket.outputs, program.pieces.outputs, strict=True):
                        buffer.copy_(values_now.get(slot, values[slot]))
                    self.set.bring(self.bucket)

            self.steps.append(recorder.record(run))
            for slot, result in zip(step.outputs, results, strict=True):
                values[slot] = result

    def _attend(self, site: int, operands: Sequence[Tensor | None]) -> Tensor:
        program, static = self.runner.program, self.bucket.static
        q, k, v, sinks, slopes = operands
        assert q is not None and k is not None and v is not None
        if static.cache is not None:
            write_site(k, v, program.sites[site], static)
        return program.attention.run(q, k, v, sinks, slopes, program.sites[site], static)

    def __call__(self, args: Sequence[Any], batch: PrefillBatch) -> list[Tensor]:
        """Outputs of the body, cut to real rows, as a replay of the whole graph gives them."""
        # The sources of the inputs must not be let go of before the last launch.
        outputs, _sources = self.set.stage(self.tokens, args, batch, None, owned=True)
        for step in self.steps:
            if isinstance(step, _Attention):
                step.out.copy_(self._attend(step.site, step.operands))
            else:
                step.replay()
        return outputs

    def close(self) -> None:
        """Free the graphs."""
        for step in self.steps:
            if isinstance(step, RecordedGraph):
                step.close()
        self.steps.clear()
        self.set.close()
