"""Ways to run a body, each as a call of token ids, with what it took to get ready."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile.bench.pieces import PiecewiseBucket
from fullgraph_compile.bench.timing import free_bytes, synchronize
from fullgraph_compile.compiled_body import compiled_body
from fullgraph_compile.dispatch import Decision, Reason, Route
from fullgraph_compile.graphs import create_recorder
from fullgraph_compile.runner import BodyRunner

Call = Callable[[Tensor], Any]


def plain_route(name: str, body: nn.Module) -> Call:
    """A way to run the body that is none of ours."""
    call: Any = body
    if name != "eager":
        call = torch.compile(body, mode="reduce-overhead" if name == "reduce-overhead" else None)

    def run(ids: Tensor) -> Any:
        if name != "eager":
            ids = ids.detach()
            torch._dynamo.maybe_mark_dynamic(ids, 1)
        with torch.inference_mode():
            return call(input_ids=ids, use_cache=False)[0]

    return run


def first_call(call: Call, ids: Tensor, device: torch.device) -> float:
    """Seconds that the first call takes."""
    synchronize(device)
    start = time.perf_counter()
    call(ids)
    synchronize(device)
    return time.perf_counter() - start


def forget(device: torch.device) -> None:
    """Free what torch.compile holds."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Ours:
    """A body that ``fgc.compile`` compiled.

    Attributes:
        ready_s: seconds from ``fgc.compile`` until every bucket was captured.
        memory_bytes: device memory that this took.
    """

    body: nn.Module
    device: torch.device
    options: dict[str, Any]
    ready_s: float = 0.0
    memory_bytes: int = 0
    _batches: dict[int, fgc.PrefillBatch] = field(default_factory=dict)

    def start(self) -> None:
        """Compile and capture."""
        free, start = free_bytes(self.device), time.perf_counter()
        fgc.compile(self.body, **self.options)
        fgc.warmup(self.body)
        synchronize(self.device)
        self.ready_s = time.perf_counter() - start
        self.memory_bytes = free - free_bytes(self.device)

    def __call__(self, ids: Tensor) -> Tensor:
        """One request, everything included: the call that the other routes get."""
        with torch.inference_mode():
            return self.body(input_ids=ids, use_cache=False)[0]

    def decision(self, tokens: int) -> Decision:
        """What a call of so many tokens does."""
        return self.runner.decide(fgc.PrefillBatch([tokens], device=self.device))

    @property
    def runner(self) -> BodyRunner:
        compiled = compiled_body(self.body)
        assert compiled is not None
        graphs = compiled.graphs()
        if not graphs:
            raise RuntimeError(f"nothing was traced for graphs: {fgc.report(self.body).why()}")
        return graphs[0].runner

    def arguments(self, ids: Tensor) -> list[Any]:
        """What the traced graph takes, for a call of these ids."""
        compiled = compiled_body(self.body)
        assert compiled is not None
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        for variant in (v for variants in compiled.forms.variants.values() for v in variants):
            if variant.direct:
                given: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
                return variant.arguments({name: given[name] for name in {*variant.names.values()}})
        raise RuntimeError("the body's results cannot be rebuilt without Dynamo, so its pieces are not run apart")

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Calls inside run the compiled pieces at exact sizes, which the report neither counts nor warns of."""
        runner, before, report = self.runner, self.runner.limits, self.runner.report
        then = report.copy()
        runner.limits = replace(before, blocked=Reason.GRAPHS_OFF)
        report.details[Reason.GRAPHS_OFF] = "asked for"
        try:
            yield
        finally:
            runner.limits, report.details = before, then.details
            report.take_counts(then)

    @contextmanager
    def pieces(self, bucket: int, ids: Tensor) -> Iterator[Call]:
        """A bucket captured in pieces; a call takes its outputs as a call of the body does."""
        recorder = create_recorder("cuda", self.device)
        assert recorder is not None
        piecewise = PiecewiseBucket(self.runner, recorder, bucket, self.arguments(ids))

        def run(ids: Tensor) -> list[Tensor]:
            batch = fgc.PrefillBatch([ids.shape[1]], device=self.device)
            with torch.no_grad():
                return piecewise(self.arguments(ids), batch)

        try:
            yield run
        finally:
            piecewise.close()


def is_graph(decision: Decision) -> bool:
    return decision.route is Route.GRAPH


def random_ids(vocabulary: int, tokens: int, device: torch.device, count: int = 8) -> Sequence[Tensor]:
    """Different token ids ``[1, tokens]``."""
    return [torch.randint(vocabulary, (1, tokens), device=device) for _ in range(count)]
