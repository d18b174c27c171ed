"""One capture by SGLang's runner, with the compiled body in place of the model's own."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

from torch import nn

from fullgraph_compile.compilers import warm_workers
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.sglang.attention import Sites, hooked_forward, replaced
from fullgraph_compile.integrations.sglang.body import CompiledForward, NotCompiled, difference, without_empty_list
from fullgraph_compile.integrations.sglang.own_attention import OwnAttention
from fullgraph_compile.integrations.sglang.release import ATTENTION, CURRENT_ATTENTION, attention_context, find
from fullgraph_compile.integrations.sglang.settings import Settings
from fullgraph_compile.integrations.sglang.traceable import traceable
from fullgraph_compile.report import Report, log


class Unsafe(RuntimeError):
    """The body's padding is not proven safe, so no graph may be captured of it."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"fullgraph_compile: {Reason.UNPROVEN.value}: {detail}")
        self.detail = detail


class CaptureSession:
    """What stands in for the body's forward while SGLang captures.

    The first call runs three times: as SGLang runs it, traced and compiled, and, where no count without a value can be
    traced, with one.  What cannot be compiled is captured as SGLang has it; what is not proven is not captured.

    Attributes:
        failed: why the body is captured as it is; None = it is not.
        own: our own attention, where it takes the place of SGLang's.
    """

    def __init__(self, body: nn.Module, settings: Settings, report: Report, own: OwnAttention) -> None:
        self.body, self.settings, self.report, self.own = body, settings, report, own
        self.failed: NotCompiled | None = None
        self._stack = contextlib.ExitStack()
        self._original: Any = None
        self._sites: Sites | None = None
        self._compiled: tuple[CompiledForward, bool] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """For the time of the capture: SGLang captures what ``body.forward`` computes then."""
        attention = find(ATTENTION)
        parameter = next(self.body.parameters(), None)
        if parameter is not None:
            warm_workers(self.settings.compiler, parameter.device)
        self._sites = sites = Sites(attention.forward, attention_context(), find(CURRENT_ATTENTION))
        self._original = self.body.forward
        # SGLang reads the signature of the body's forward.
        forward = functools.wraps(self._original)(lambda *args, **kwargs: self._forward(*args, **kwargs))
        with contextlib.ExitStack() as stack:
            stack.callback(sites.forget)
            stack.enter_context(replaced(attention, "forward", hooked_forward(sites)))
            stack.enter_context(replaced(self.body, "forward", forward))
            self._stack = stack
            yield

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._sites is not None
        self._sites.batch = args[2] if len(args) > 2 else kwargs["forward_batch"]
        if self.failed is not None:
            return self._original(*args, **kwargs)
        if self._compiled is None:
            return self._first(args, kwargs)
        compiled, unbacked = self._compiled
        return compiled(args, kwargs, unbacked=unbacked)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._sites is not None
        start = time.perf_counter()
        expected = without_empty_list(self._original(*args, **kwargs))
        try:
            if self._sites.refused:
                raise NotCompiled(Reason.UNMARKED, "; ".join(dict.fromkeys(self._sites.refused)))
            described = self._sites.described(self.body)
            if self.own.choose(self._sites, described):
                self._sites.own = self.own
            with contextlib.ExitStack() as stack:
                stack.enter_context(traceable(self.body))
                output = self._compile(args, kwargs)
                wrong = difference(output, expected)
                if wrong is not None:
                    raise NotCompiled(Reason.NOT_COMPILED, f"the compiled body is wrong: {wrong}")
                # Dynamo's guards are asked until the capture ends; what is not compiled is captured with SGLang's ops.
                self._stack.enter_context(stack.pop_all())
        except NotCompiled as error:
            self._compiled, self._sites.own = None, None
            self.own.leave("the body is not compiled")
            self._give_up(error)
            return expected
        if self._sites.own is not None:
            self.own.take_over(self._stack)
        self.report.sites = described
        log.info("%s: compiled in %.1f s", self.report.name, time.perf_counter() - start)
        return output

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._sites is not None
        refusal: NotCompiled | None = None
        for unbacked in (True, False):
            compiled = CompiledForward(self._original, self._sites, self.settings, self.report)
            try:
                output = compiled(args, kwargs, unbacked=unbacked)
            except NotCompiled as error:
                if error.reason is not Reason.NOT_TRACED:
                    raise
                log.debug("%s: unbacked=%s: %s", self.report.name, unbacked, error)
                refusal = error
                continue
            self._compiled = compiled, unbacked
            return output
        assert refusal is not None
        raise refusal

    def _give_up(self, error: NotCompiled) -> None:
        if error.reason is Reason.UNPROVEN:
            raise Unsafe(error.detail) from None
        if self.settings.strict:
            raise RuntimeError(f"fullgraph_compile: the body is not compiled: {error}") from None
        self.failed = error
        self.report.proof = f"not looked at, as the body is captured as SGLang has it: {error}"
        log.warning("%s: the body is captured as SGLang has it, not compiled: %s", self.report.name, error)
