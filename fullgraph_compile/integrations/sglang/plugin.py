"""The hooks into SGLang: which prefill backend it takes, what that backend captures, and what becomes of failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.sglang import release, routes
from fullgraph_compile.integrations.sglang.backend import adopt
from fullgraph_compile.integrations.sglang.counting import as_json, count_all
from fullgraph_compile.integrations.sglang.metadata import check_attention, describe_attention
from fullgraph_compile.integrations.sglang.release import Release, find
from fullgraph_compile.integrations.sglang.session import Unsafe
from fullgraph_compile.integrations.sglang.settings import SWITCH, Settings
from fullgraph_compile.registry import register
from fullgraph_compile.report import Report, log


@dataclass
class Plugin:
    """The plugin in one process.

    Attributes:
        reports: one for each model whose prefill was captured, or was not.
    """

    settings: Settings
    release: Release
    reports: list[Report] = field(default_factory=list)
    # Set while SGLang builds a runner: the report of its model.
    building: Report | None = None

    # -- hooks: each gets what it wraps first ----------------------------------------------------------------------

    def parse(self, original: Callable[..., Any], server_args: Any) -> Any:
        """Take ``full`` for prefill where the user chose nothing.  It is not marked as the user's own choice, so that
        SGLang may still turn graphs off where it must."""
        result = original(server_args)
        prefill = _resolved(server_args)
        if _chosen(server_args):
            if prefill.backend != "full":
                log.warning(
                    "%s=1 does nothing: prefill backend %r was chosen, the plugin serves 'full' only", SWITCH,
                    str(prefill.backend),
                )  # fmt: skip
        elif prefill.backend != "disabled":
            log.info("prefill backend 'full' in place of %r, by %s", str(prefill.backend), SWITCH)
            prefill.backend = "full"
        return result

    def resolve(self, original: Callable[..., Any], cuda_graph_runner: Any) -> Any:
        backend = original(cuda_graph_runner)
        if self.building is None:
            return backend
        return adopt(backend, cuda_graph_runner, self.settings, self.building)

    def capture(self, original: Callable[..., Any], *, model_runner: Any, eager_runner: Any, **kwargs: Any) -> Any:
        """Capture prefill; where no graph may be captured, say why and let SGLang run prefill eagerly."""
        if model_runner.is_draft_worker:
            return original(model_runner=model_runner, eager_runner=eager_runner, **kwargs)
        report = self.building = Report(name=f"SGLang prefill of {type(model_runner.model).__name__}")
        self.reports.append(report)
        register(_Reported(report, model_runner), list(model_runner.model.parameters()))
        config = _published(model_runner.server_args)
        full = str(config.backend) == "full"
        try:
            if full:
                check_attention(model_runner.attn_backend)
            result = original(model_runner=model_runner, eager_runner=eager_runner, **kwargs)
        except Unsafe as error:
            if self.settings.unsafe == "error" or self.settings.strict:
                raise
            return self._eager(model_runner, eager_runner, Reason.UNPROVEN, error.detail, report)
        finally:
            self.building = None
        if not hasattr(result, "runner"):
            # SGLang answers with the runner itself where no bucket is legal, which its caller does not expect.
            return self._eager(model_runner, eager_runner, Reason.NO_BUCKET, _no_bucket(model_runner, config), report)
        if full:
            self._captured(result, model_runner, eager_runner, report)
        elif not _chosen(model_runner.server_args):
            detail = f"SGLang turned 'full' prefill graphs off ({str(config.backend)!r}); its log says why"
            self._nothing(eager_runner, Reason.GRAPHS_OFF, detail, report)
        return result

    def state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Show the reports where SGLang shows its own state."""
        output = original(*args, **kwargs)
        if isinstance(getattr(output, "internal_state", None), dict):
            output.internal_state["fullgraph_compile"] = [{"name": r.name, **as_json(r)} for r in self.reports]
        return output

    # -- what came of it -------------------------------------------------------------------------------------------

    def _captured(self, result: Any, model_runner: Any, eager_runner: Any, report: Report) -> None:
        backend: Any = getattr(result.runner, "backend", None)
        session = getattr(backend, "session", None)
        if session is None:
            detail = "SGLang captured no prefill graph; its log says why"
            self._nothing(eager_runner, Reason.GRAPHS_OFF, detail, report)
            return
        report.graph_bytes = int(result.memory_usage_gb * 2**30)
        if not session.failed and self.settings.measured_routes:
            self._choose_routes(result.runner, model_runner, eager_runner, report)
        what = "the body as SGLang has it" if session.failed else f"{self.settings.compiler}, {report.compiles} trace"
        log.info(
            "fullgraph_compile %s on SGLang %s: %s: %s; %d attention sites, %d buckets %s, %d request slots, "
            "%d graphs; attention by %s; padding %s; compiled in %.1f s, captured in %.1f s",
            _version(), self.release.version, report.name, what, len(report.sites),
            len(report.buckets), list(report.buckets), report.slots, len(backend._graphs), session.own.words,
            report.proof, report.compile_seconds, report.capture_seconds,
        )  # fmt: skip

    def _choose_routes(self, runner: Any, model_runner: Any, eager_runner: Any, report: Report) -> None:
        """Time each bucket's ways, and take the best.  What fails here leaves every bucket with the compiled body."""
        why = routes.unmeasurable(runner)
        if why is not None:
            log.info("%s: buckets are not timed: %s", report.name, why)
            return
        start, free = time.perf_counter(), routes.free_memory()
        try:
            times, theirs = routes.measure(model_runner, eager_runner, runner)
        except Exception as error:
            log.warning("%s: buckets could not be timed, each keeps the compiled body: %r", report.name, error)
            return
        finally:
            report.replays.clear()
            report.padding.clear()
        routes.settle(runner.backend, theirs, times, report)
        report.graph_bytes = max(0, report.graph_bytes + free - routes.free_memory())
        log.info("%s: measured in %.1f s: %s", report.name, time.perf_counter() - start, "; ".join(report.routes))

    def _eager(self, model_runner: Any, eager_runner: Any, reason: Reason, detail: str, report: Report) -> Any:
        self._nothing(eager_runner, reason, detail, report)
        return find(release.GRAPH_CAPTURE)(
            runner=eager_runner, memory_phase="prefill", memory_usage_gb=0, capture_time=0
        )

    def _nothing(self, eager_runner: Any, reason: Reason, detail: str, report: Report) -> None:
        """Nothing is captured: say so, and count each batch; under strict, end SGLang."""
        if self.settings.strict:
            raise RuntimeError(f"fullgraph_compile: {reason.value}: {detail} ({SWITCH}=strict)")
        log.warning("%s runs eagerly: %s: %s", report.name, reason.value, detail)
        report.ready = True
        count_all(eager_runner, reason, detail, report)


class _Reported:
    """What ``fgc.report()`` finds; lives as long as the model's runner."""

    def __init__(self, report: Report, owner: Any) -> None:
        self.report = report
        owner._full_prefill_reported = self


def install(settings: Settings) -> Plugin:
    """Register the hooks and see that SGLang took them: it would only log one that it cannot place.

    Raises:
        UnknownRelease: this SGLang is not known, or did not take a hook.
    """
    found = release.installed()
    if not found.tested:
        log.warning("SGLang %s was not tested with the plugin (tested: %s)", found.version, ", ".join(release.TESTED))
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin = Plugin(settings, found)
    hooks = {
        found.parse: plugin.parse,
        release.RESOLVE: plugin.resolve,
        release.CAPTURE: plugin.capture,
        release.STATE: plugin.state,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    lost = sorted(set(hooks) - set(HookRegistry._patched))
    if lost:
        raise release.UnknownRelease(f"SGLang {found.version} did not take the hooks on {', '.join(lost)}")
    return plugin


def _version() -> str:
    try:
        return version("fullgraph-compile")
    except PackageNotFoundError:
        return "(not installed)"


def _resolved(server_args: Any) -> Any:
    """The configuration of prefill graphs while SGLang still resolves its arguments."""
    view = find(release.ROOT + "arg_groups.overrides.resolving_view")
    return (server_args if view is None else view(server_args)).cuda_graph_config.prefill


def _published(server_args: Any) -> Any:
    """The configuration of prefill graphs that the runners read."""
    if find(release.ROOT + "arg_groups.overrides.resolving_view") is None:
        return server_args.cuda_graph_config.prefill
    return find(release.ROOT + "runtime_context.get_exec")().graph.cuda_graph_config.prefill


def _chosen(server_args: Any) -> bool:
    """Whether the user named a prefill backend."""
    return ("prefill", "backend") in {(str(p), k) for p, k in server_args._cuda_graph_config_locked}


def _no_bucket(model_runner: Any, config: Any) -> str:
    slots, context = config.full_prefill_max_req, model_runner.model_config.context_len
    return (
        f"attention {describe_attention(model_runner.attn_backend)}, context length {context}, capacity "
        f"{slots} request slots x {context} = {(slots or 0) * context} tokens; give SGLang buckets "
        f"(--cuda-graph-bs-prefill) within it"
    )
