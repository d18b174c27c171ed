"""What Dynamo calls where a body is captured: one graph for any token count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fullgraph_compile.batch import PrefillBatch, active_batch
from fullgraph_compile.batch_of_call import check_batch, restarts
from fullgraph_compile.dispatch import Decision, Reason, RequestsMeet, Route
from fullgraph_compile.passes.autocast_regions import forward_of
from fullgraph_compile.plain_graph import PlainGraph
from fullgraph_compile.registry import register
from fullgraph_compile.runner import BodyRunner, WeightsChanged


@dataclass(frozen=True)
class Alone:
    """How a graph runs for one request of a batch at a time.

    Attributes:
        why: what puts rows of several requests together otherwise, in words.
        inputs: token dim of each input that has one, by its index.
        sizes: inputs that are the token count.
        outputs: token dim of each result; None = it has none, or is no tensor.
    """

    why: str
    inputs: dict[int, int]
    sizes: tuple[int, ...]
    outputs: tuple[int | None, ...]


class CapturedGraph:
    """One symbolic graph of Dynamo's: the body by graph or at exact sizes, then the tail on real rows.

    Args:
        runner: runs the body.
        tail: takes the body's outputs and the inputs ``tail_inputs``, returns what the traced graph returned.
        token_input: index and token dim of an input that tells the token count.
        positions: index of the position ids from which requests are told apart where no batch is active; None = all
            tokens are one request then.
        detail: what blocks the graph, for the report.
        serves: whether the trace is for a token count, by the guards that tracing put on it; kept by count.
        serves_one: whether it may be for a single token too, which no branch of the model leaves out.
        other_branch: whether the model's code takes another branch for a token count; None = it does not ask for it.
        tail_mixes: ops of the tail that are not row by row, in words.
        tail_alone: where the tail puts rows together: how it is run for each request of a batch alone; else it runs on
            the rows of all requests at once.
    """

    # Token counts of which it is known whether the trace is for them.
    MOST_COUNTS = 4096

    def __init__(
        self,
        runner: BodyRunner,
        tail: GraphModule,
        tail_inputs: tuple[int, ...],
        *,
        token_input: tuple[int, int],
        positions: int | None = None,
        detail: str = "",
        serves: Callable[[int], bool] = lambda tokens: True,
        serves_one: bool = False,
        other_branch: Callable[[int], bool] | None = None,
        tail_mixes: str = "",
        tail_alone: Alone | None = None,
        strict: bool = False,
    ) -> None:
        self.tail_alone = tail_alone
        # Asked at each call, so what is known is looked up without a step in Python.
        self.serves = lru_cache(maxsize=self.MOST_COUNTS)(serves)
        self.serves_one = serves_one
        self.other_branch = other_branch
        self.tail_mixes = tail_mixes
        # What runs where the weights are not of the traced form any more; None raises WeightsChanged instead.
        self.as_traced: PlainGraph | None = None
        self.runner = runner
        self.tail = forward_of(tail)
        self._passes = _passed_on(tail, len(tail_inputs))
        # Whether each of these is returned once, and has rows, so that the graph can bring it to the caller.
        rows = [i for i, (_, dim) in enumerate(runner.outputs) if dim is not None]
        self._brought = (
            bool(self._passes) and set(self._passes) <= set(rows) and len({*self._passes}) == len(self._passes)
        )
        self.tail_inputs = tail_inputs
        self.report = runner.report
        self.token_input = token_input
        self.positions = positions
        self.detail = detail
        self.strict = strict

    def __call__(self, *args: Any) -> Any:
        return tuple(self.serve(args, None))

    def serve(self, args: Sequence[Any], batch: PrefillBatch | None, *, owned: bool = True) -> Sequence[Any]:
        """Make a call.

        Args:
            args: values of the placeholders; not kept.
            batch: what the call is for, checked; None = the active one, or what the model itself would see.
            owned: False gives views of buffers that the next call overwrites, whatever the options say.
        """
        if batch is None:
            batch = self.batch_of(args)
        runner = self.runner
        if runner.limits.single_request and any(batch.cached_tokens):
            raise ValueError(
                f"{batch!r} has cached tokens, but the body cannot go on after them: {self.report.proof}; if it makes "
                "positions of its own, give position_ids=batch.position_ids[None]"
            )
        if self.other_branch is not None and batch.requests > 1:
            self._check_branches(batch, self.other_branch)
        with runner.lock:
            decision = runner.decide(batch)
            replayed = decision.route is Route.GRAPH
            if self.strict and not replayed:
                self._count(decision, batch, args)
            several = batch.requests > 1 and batch.tokens > 0
            tail_alone = self.tail_alone
            # What the tail does nothing with is the caller's as the graph brings it.
            copied = owned and runner.clone_outputs
            if tail_alone is not None and not (several and active_batch() is not None):
                tail_alone = None
            if not replayed and several and self._one_at_a_time:
                if tail_alone is not None:
                    inputs = tail_alone.inputs | runner.inputs.tokens
                    sizes = (*tail_alone.sizes, *runner.inputs.sizes)
                    return self._tails(self._requests(args, batch, inputs, sizes), batch, tail_alone)
                rows = self._one_by_one(args, batch)
            else:
                try:
                    rows, decision = runner.run(args, batch, decision, owned=copied and self._brought)
                except WeightsChanged:
                    if self.as_traced is None:
                        raise
                    return self.as_traced(*args)
                self._count(decision, batch, args)
            if tail_alone is not None:
                return self._tails(self._rows_of_requests(rows, args, batch, tail_alone), batch, tail_alone)
            if self._passes and decision.route is Route.GRAPH:
                if copied and not self._brought:
                    return [rows[i].clone() for i in self._passes]
                return list(map(rows.__getitem__, self._passes))
            results = self.tail(*rows, *[args[i] for i in self.tail_inputs])
            if not owned:
                return tuple(results)
            return [runner.owned(r) if isinstance(r, Tensor) else r for r in results]

    @property
    def _one_at_a_time(self) -> bool:
        """Whether several requests must not run together, also where no graph is used: they would get each other's
        positions, or be mixed by the op for which the body is not proven.  No graph is chosen for them then."""
        return self.runner.limits.single_request or self.runner.limits.blocked is Reason.UNPROVEN

    def batch_of(self, args: Sequence[Any]) -> PrefillBatch:
        """The active batch if there is one, checked against the inputs; else what the model itself would see."""
        index, dim = self.token_input
        tokens = args[index].shape[dim]
        batch = active_batch()
        if batch is not None:
            check_batch(batch, tokens, self.runner.device)
            return batch
        if self.positions is None:
            return PrefillBatch([tokens], device=self.runner.device)
        self.report.device_reads += args[self.positions].device.type != "cpu"
        return PrefillBatch(restarts(args[self.positions]), device=self.runner.device)

    def serve_one_token(self) -> None:
        """Serve a single token too, whatever the guards say: it was seen to be right."""
        serves = self.serves
        self.serves = lru_cache(maxsize=self.MOST_COUNTS)(lambda tokens: tokens == 1 or serves(tokens))

    def serve_one_request(self) -> None:
        """Serve each request by a call of its own, whatever the proof says: the module was seen to need it."""
        if not self.runner.limits.single_request:
            self.runner.limits = replace(self.runner.limits, single_request=True)
            self.report.proof += "; one request a graph, as two packed ones were not equal to each alone"

    def release(self) -> None:
        """Free the graphs."""
        self.runner.release()

    def _check_branches(self, batch: PrefillBatch, other: Callable[[int], bool]) -> None:
        """Raise ``RequestsMeet`` where the model would compute something else for a request alone."""
        for new in filter(other, batch.new_tokens):
            raise RequestsMeet(
                self.report.name,
                batch,
                f"the model's code asks for the token count, and takes another branch for {new} tokens than for the "
                f"{batch.tokens} of the call",
            )

    def _one_by_one(self, args: Sequence[Any], batch: PrefillBatch) -> list[Tensor]:
        """Each request in a call of its own, for a body whose rows tell requests apart only that way."""
        inputs, dims = self.runner.inputs, [dim for _, dim in self.runner.outputs]
        parts = [
            [t.clone() for t in rows] for _, rows in self._requests(args, batch, inputs.tokens, tuple(inputs.sizes))
        ]
        why = self.detail or self.report.proof if self.runner.limits.blocked is Reason.UNPROVEN else ""
        return self._together(parts, dims, batch, why)

    def _tails(
        self, requests: Iterator[tuple[list[Any], list[Tensor]]], batch: PrefillBatch, alone: Alone
    ) -> tuple[Any, ...]:
        """The tail of each request by itself: from the arguments of the request, and the rows that the body made."""
        parts = []
        for one, rows in requests:
            results = self.tail(*rows, *[one[i] for i in self.tail_inputs])
            parts.append([r.clone() if isinstance(r, Tensor) else r for r in results])
        return tuple(self._together(parts, alone.outputs, batch, alone.why))

    def _rows_of_requests(
        self, rows: Sequence[Tensor], args: Sequence[Any], batch: PrefillBatch, alone: Alone
    ) -> Iterator[tuple[list[Any], list[Tensor]]]:
        """Arguments of each request that has tokens, and its own of the rows that the body made of all."""
        dims = [dim for _, dim in self.runner.outputs]
        for r, start, one in _apart(args, batch, alone.inputs, alone.sizes):
            new = batch.new_tokens[r]
            yield one, [t if dim is None else t.narrow(dim, start, new) for t, dim in zip(rows, dims, strict=True)]

    def _requests(
        self, args: Sequence[Any], batch: PrefillBatch, inputs: dict[int, int], sizes: tuple[int, ...]
    ) -> Iterator[tuple[list[Any], list[Tensor]]]:
        """Arguments of each request that has tokens, and what the body makes of them; the next overwrites it."""
        for r, _, one in _apart(args, batch, inputs, sizes):
            alone = batch.request(r)
            rows, decision = self.runner.run(one, alone)
            self._count(decision, alone, one)
            yield one, rows

    def _together(self, parts: list[list[Any]], dims: Sequence[int | None], batch: PrefillBatch, why: str) -> list[Any]:
        """Results of each request as those of the batch: rows one behind the other, and what is the same for all.

        Args:
            why: what may make other results differ between requests; empty = nothing does.

        Raises:
            RequestsMeet: they differ.
        """
        whole = [[p[i] for p in parts] for i, dim in enumerate(dims) if dim is None]
        if why and not all(_same(same[0], other) for same in whole for other in same[1:]):
            raise RequestsMeet(
                self.report.name,
                batch,
                f"it is not proven to keep requests apart ({why}), and returns something else than rows, which depends "
                "on them",
            )
        return [parts[0][i] if dim is None else torch.cat([p[i] for p in parts], dim) for i, dim in enumerate(dims)]

    def _count(self, decision: Decision, batch: PrefillBatch, args: Sequence[Any]) -> None:
        if decision.route is Route.GRAPH:
            assert decision.bucket is not None
            self.report.replayed(decision.bucket, batch.tokens)
            return
        assert decision.reason is not None
        if decision.reason is Reason.WEIGHTS_MOVED:
            # Found by other parameters from now on.
            register(self, [args[i] for i in self.runner.inputs.weights])
        detail = self.detail if decision.reason is self.runner.limits.blocked else self._about(decision.reason, batch)
        self.report.fell_back(decision.reason, detail, strict=self.strict)

    def _about(self, reason: Reason, batch: PrefillBatch) -> str:
        limits = self.runner.limits_over(batch.cache)
        if reason is Reason.OVER_LADDER:
            return f"{batch.tokens} tokens, largest bucket {limits.ladder[-1]}"
        if reason is Reason.OVER_SLOTS:
            return f"{batch.requests} requests, {limits.slots} slots"
        if reason is Reason.OVER_CONTEXT:
            return f"{batch.longest} tokens in one request, context_length {limits.context_length}"
        if reason is Reason.PADDING:
            return f"{batch.tokens} tokens, ladder {list(limits.ladder)}, max_padding {limits.max_padding:g}"
        return self.report.details.get(reason, "")


def _apart(
    args: Sequence[Any], batch: PrefillBatch, inputs: dict[int, int], sizes: tuple[int, ...]
) -> Iterator[tuple[int, int, list[Any]]]:
    """Each request that has tokens: its number, the row that it begins at, and the arguments as if it were alone.

    Args:
        inputs: token dim of each argument that has one, by index.
        sizes: arguments that are the token count.
    """
    start = 0
    for r, new in enumerate(batch.new_tokens):
        if new == 0:
            continue
        one = list(args)
        for i, dim in inputs.items():
            one[i] = args[i].narrow(dim, start, new)
        for i in sizes:
            one[i] = new
        yield r, start, one
        start += new


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _passed_on(tail: GraphModule, more: int) -> tuple[int, ...]:
    """The body's outputs that a tail returns, in order, where it does nothing else; else empty.

    Args:
        more: how many inputs it has after the body's outputs.
    """
    nodes = list(tail.graph.nodes)
    rows, returned = nodes[: len(nodes) - 1 - more], nodes[-1].args[0]
    if not isinstance(returned, (tuple, list)) or not all(node in rows for node in returned):
        return ()
    return tuple(map(rows.index, returned)) if all(node.op == "placeholder" for node in nodes[:-1]) else ()
