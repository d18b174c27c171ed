"""What Dynamo calls for a graph of one exact size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from fullgraph_compile.batch import PrefillBatch, active_batch
from fullgraph_compile.batch_of_call import check_batch
from fullgraph_compile.dispatch import Reason, Route
from fullgraph_compile.passes.autocast_regions import forward_of
from fullgraph_compile.report import Report
from fullgraph_compile.runner import BodyRunner


class StaticGraph:
    """One graph that Dynamo traced for a fixed size.

    Such a graph is often the first of a series and never seen again, so it is run as it was traced; one that is
    called a third time is compiled and captured as one bucket of exactly its size, which needs no padding.

    Args:
        gm: the graph.
        tokens: its token count, as the bucket's name.
        make_runner: compiles the graph and returns its runner.
        separates: tells whether the model's own masks tell requests apart; asked only inside a batch of several.
    """

    CAPTURE_AT = 3

    def __init__(
        self,
        gm: GraphModule,
        tokens: int,
        make_runner: Callable[[], BodyRunner],
        separates: Callable[[], bool],
        report: Report,
        *,
        device: torch.device,
        strict: bool = False,
    ) -> None:
        self._as_traced = forward_of(gm)
        self.tokens = tokens
        self.report = report
        self.device = device
        self.strict = strict
        self._make_runner = make_runner
        self._separates = separates
        self._calls = 0
        self.runner: BodyRunner | None = None

    def __call__(self, *args: Any) -> Any:
        self._check_batch()
        self._calls += 1
        if self.runner is None and self._calls >= self.CAPTURE_AT:
            self.runner = self._make_runner()
        if self.runner is None:
            self.report.fell_back(Reason.STATIC_SHAPE, f"{self.tokens} tokens, call {self._calls}", strict=self.strict)
            return self._as_traced(*args)
        with self.runner.lock:
            results, decision = self.runner.run(args, PrefillBatch([self.tokens], device=self.device))
            if decision.route is Route.GRAPH:
                self.report.replayed(self.tokens, self.tokens)
            else:
                assert decision.reason is not None
                detail = self.report.details.get(decision.reason, "")
                self.report.fell_back(decision.reason, detail, strict=self.strict)
            return tuple(self.runner.owned(r) for r in results)

    def serves(self, tokens: int) -> bool:
        """Whether the trace is for a token count: Dynamo itself is asked at each call."""
        return True

    def release(self) -> None:
        """Free the graph."""
        if self.runner is not None:
            self.runner.release()

    def _check_batch(self) -> None:
        batch = active_batch()
        if batch is None:
            return
        check_batch(batch, self.tokens, self.device)
        what = "has a KV cache" if batch.cache is not None else "holds several requests"
        if batch.cache is not None or (batch.requests > 1 and not self._separates()):
            raise ValueError(
                f"{batch!r} {what}, but this call was traced for exactly {self.tokens} tokens, with "
                "the model's own attention, which takes them for one request, or it puts their rows together; call "
                "fullgraph_compile.warmup first, or use fullgraph_compile.compile"
            )
