"""What tests ask of a body whose weights were fused."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullgraph_compile.fused_weights import FusedProgram
from fullgraph_compile.passes.common import op_name
from tests.models import tiny
from tests.runtime.bodies import ready, runners

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def llama(**changes: Any) -> nn.Module:
    return tiny("Llama", num_hidden_layers=1, **changes)


def prepared(module: nn.Module, **options: Any) -> Any:
    """Compiled in place, and captured: one bucket is enough here, and quick."""
    return ready("compile", module, buckets=[16], **options)


def stacks(body: Any) -> list[int]:
    """How many parameters each fused weight and bias of the body has."""
    programs = [r.program for r in runners(body)]
    return sorted(len(s) for p in programs if isinstance(p, FusedProgram) for s in p.stacks)


def linears(body: Any) -> int:
    pieces = runners(body)[0].program.pieces
    each = [sum(op_name(n) in ("linear", "addmm") for n in kind.graph.nodes) for kind in pieces.kinds]
    return sum(each[s.kind] for s in pieces.steps if hasattr(s, "kind"))


def shared(module: nn.Module) -> set[str]:
    """Names of the parameters that do not own their storage."""
    return {n for n, p in module.named_parameters() if p.untyped_storage().nbytes() != p.nbytes}


def held(module: nn.Module) -> int:
    """Bytes of all storages that the module's parameters hold."""
    storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in module.parameters())}
    return sum(storages.values())
