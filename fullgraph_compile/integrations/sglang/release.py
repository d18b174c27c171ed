"""Which SGLang is installed, told by what it has, and what the plugin hooks into."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any

ROOT = "sglang.srt."
ATTENTION = ROOT + "layers.radix_attention.RadixAttention"
CURRENT_ATTENTION = ROOT + "model_executor.forward_context.get_attn_backend"
RESOLVE = ROOT + "model_executor.runner_backend.utils.resolve_prefill_backend"
CAPTURE = ROOT + "model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph"
GRAPH_CAPTURE = ROOT + "model_executor.model_runner_components.cuda_graph_setup.GraphCapture"
FULL_BACKEND = ROOT + "model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
POOL = ROOT + "mem_cache.memory_pool.MHATokenToKVPool"
READ_ENDS = ROOT + "layers.attention.base_attn_backend.SharedReadEnds"
RUNNER = ROOT + "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
PARSE = (
    ROOT + "arg_groups.cuda_graph_hook.parse_cuda_graph_config",
    ROOT + "server_args.ServerArgs._parse_cuda_graph_config",
)
STATE = ROOT + "managers.scheduler.Scheduler.get_internal_state"

# Target: the arguments that the plugin counts on.
_TARGETS: dict[str, tuple[str, ...]] = {
    f"{ATTENTION}.forward": ("self", "q", "k", "v", "forward_batch", "save_kv_cache"),
    CURRENT_ATTENTION: (),
    RESOLVE: ("cuda_graph_runner",),
    CAPTURE: ("model_runner", "eager_runner"),
    GRAPH_CAPTURE: ("runner", "memory_phase", "memory_usage_gb", "capture_time"),
    f"{FULL_BACKEND}.capture_session": ("self", "stream"),
    f"{FULL_BACKEND}.capture_one": ("self", "shape_key", "forward_fn"),
    f"{FULL_BACKEND}.replay": ("self", "shape_key", "static_forward_batch"),
    f"{RUNNER}.can_run_graph": ("self", "forward_batch"),
    f"{RUNNER}.capture_prepare": ("self", "num_tokens"),
    f"{RUNNER}.load_batch": ("self", "forward_batch"),
    f"{RUNNER}._prepare_forward_metadata_for_replay": ("self", "forward_batch", "static_forward_batch"),
    STATE: ("self", "recv_req"),
}
TESTED = ("0.5.17", "0.5.23")


class UnknownRelease(RuntimeError):
    """An SGLang that the plugin does not know; names the version and what is missing."""


@dataclass(frozen=True)
class Release:
    """The installed SGLang.

    Attributes:
        version: as the package says.
        parse: where the configuration of CUDA graphs is resolved.
    """

    version: str
    parse: str

    @property
    def tested(self) -> bool:
        return self.version in TESTED


def find(target: str) -> Any:
    """What a dotted name means, or None."""
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None


def missing_targets() -> list[str]:
    """What the plugin needs and this SGLang has not: names, with the arguments that changed."""
    missing = []
    for target, arguments in _TARGETS.items():
        found = find(target)
        if found is None:
            missing.append(target)
            continue
        names = _argument_names(found)
        lost = [a for a in arguments if a not in names]
        if lost:
            missing.append(f"{target} (argument {', '.join(lost)})")
    if not any(find(target) for target in PARSE):
        missing.append(" or ".join(PARSE))
    return missing


def _argument_names(target: Any) -> tuple[str, ...]:
    # The signature of a struct asks for types that its module does not import.
    return getattr(target, "__struct_fields__", None) or tuple(inspect.signature(target).parameters)


def installed() -> Release:
    """The installed SGLang, if the plugin knows its like.

    The first that captures buckets as legal requests (0.5.17) sent attention through a custom op that knows MLA's two
    modules apart; later ones call the module itself.

    Raises:
        UnknownRelease: it has not what the plugin needs.
    """
    version = str(importlib.import_module("sglang").__version__)
    missing = missing_targets()
    if not missing and not _attention_is_known():
        missing = [f"{ATTENTION}._eager_attention, or {ROOT}layers.radix_attention.unified_attention_with_output"]
    if missing:
        raise UnknownRelease(
            f"SGLang {version} is not supported: it has no {'; no '.join(missing)}. Tested: {', '.join(TESTED)}"
        )
    return Release(version, next(target for target in PARSE if find(target)))


def attention_context() -> Any:
    """What gives the context of the custom op that older releases send attention through; None for the others."""
    if find(_OP) is None:
        return None
    return find(ROOT + "model_executor.runner_backend_utils.tc_piecewise_cuda_graph.get_tc_piecewise_forward_context")


_OP = ROOT + "layers.radix_attention._unified_attention_with_output_impl"


def _attention_is_known() -> bool:
    if find(f"{ATTENTION}._eager_attention") is not None:
        return True
    op = find(_OP)
    return op is not None and "use_mha_companion" in inspect.signature(op).parameters
