"""SGLang's full backend, which captures the compiled body and counts what it replays."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fullgraph_compile.integrations.sglang import host_plan
from fullgraph_compile.integrations.sglang.counting import count_fallbacks
from fullgraph_compile.integrations.sglang.metadata import prefill_attention
from fullgraph_compile.integrations.sglang.own_attention import OwnAttention
from fullgraph_compile.integrations.sglang.release import FULL_BACKEND, find
from fullgraph_compile.integrations.sglang.session import CaptureSession
from fullgraph_compile.integrations.sglang.settings import Settings
from fullgraph_compile.report import Report, log


@functools.cache
def backend_class(base: Any) -> Any:
    """A subclass of SGLang's full backend: its runner keys slots, metadata and outputs on the class."""

    class FullPrefillCompileBackend(base):
        """Captures the compiled body; how a graph is recorded, kept and replayed stays SGLang's own.

        Attributes:
            runner: SGLang's prefill runner; not each release's backend keeps it.
            report: what was compiled, captured, replayed and not.
            session: the last capture.
            sglangs: buckets that replay a graph of the body as SGLang has it.
            eager: buckets that run without a graph as that was measured to be faster, and the measurement in words.
        """

        runner: Any
        report: Report
        session: CaptureSession
        settings: Settings
        eager: dict[int, str]
        sglangs: set[int]
        ours = True

        @contextmanager
        def capture_session(self, stream: Any) -> Iterator[None]:
            runner, report = self.runner, self.report
            own = OwnAttention(runner, self.settings.attention)
            self.session = CaptureSession(runner.layer_model, self.settings, report, own)
            unplanned = None
            if self.settings.plan != "sglang":
                attention = prefill_attention(runner.model_runner.attn_backend)
                unplanned = host_plan.install(attention, runner, in_graph=self.settings.plan == "graph")
            self.sglangs = set()
            start, compiling = time.perf_counter(), report.compile_seconds
            with super().capture_session(stream), self.session.active():
                yield
            if unplanned is not None and own.backend is None:
                log.info("prefill attention is planned by SGLang: %s", unplanned)
            report.capture_seconds = time.perf_counter() - start - (report.compile_seconds - compiling)
            report.buckets = tuple(sorted({int(key.size) for key in self._graphs}))
            report.slots = int(runner._capture_req_slots)
            report.ready = True
            self.eager = {}
            count_fallbacks(runner, report, self.eager)

        def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
            result = super().replay(shape_key, static_forward_batch, **kwargs)
            self.report.replayed(int(shape_key.size), int(self.runner.raw_num_tokens))
            return result

    return FullPrefillCompileBackend


def adopt(backend: Any, runner: Any, settings: Settings, report: Report) -> Any:
    """Turn the backend that SGLang made into ours; any other than the full one is left as it is.

    The class is changed in place, so that whatever SGLang gave its constructor holds.
    """
    base = find(FULL_BACKEND)
    if base is None or not isinstance(backend, base):
        return backend
    made: Any = type(backend)
    backend.__class__ = backend_class(made)
    backend.runner, backend.settings, backend.report = runner, settings, report
    return backend
