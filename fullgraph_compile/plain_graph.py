"""What Dynamo calls where nothing is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fullgraph_compile.batch import active_batch
from fullgraph_compile.dispatch import FallbackError, Reason, RequestsMeet
from fullgraph_compile.report import Report


class PlainGraph:
    """A graph that is not captured: it runs as compiled or as traced, and each call counts its reason."""

    def __init__(
        self,
        call: Callable[..., Any],
        report: Report,
        reason: Reason,
        detail: str = "",
        *,
        separates: Callable[[], bool],
        strict: bool = False,
        error: bool = False,
    ) -> None:
        self.call = call
        self.separates = separates
        self.report = report
        self.reason = reason
        self.detail = detail
        self.strict = strict
        self.error = error

    def serves(self, tokens: int) -> bool:
        """Whether the trace is for a token count: Dynamo itself is asked at each call."""
        return True

    def __call__(self, *args: Any) -> Any:
        if self.error:
            raise FallbackError(f"{self.report.name}: {self.reason.value}: {self.detail} (unsafe='error' is set)")
        batch = active_batch()
        if batch is not None and batch.cache is not None:
            raise FallbackError(
                f"{self.report.name} cannot be called with {batch!r}: only a body that was compiled reads a KV cache "
                f"({self.reason.value}{f': {self.detail}' if self.detail else ''})"
            )
        if batch is not None and batch.requests > 1 and not self.separates():
            raise RequestsMeet(
                self.report.name,
                batch,
                f"no graph replays ({self.reason.value}{f': {self.detail}' if self.detail else ''}), and the model is "
                "not known to tell requests apart",
            )
        self.report.fell_back(self.reason, self.detail, strict=self.strict)
        return self.call(*args)
