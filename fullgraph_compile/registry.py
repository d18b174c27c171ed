"""A backend sees graphs, not modules: what it made is found again by the parameters that it got."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullgraph_compile.report import Report


class Compiled(Protocol):
    """Anything the backend returned."""

    report: Report


# Dynamo owns what the backend returned; a graph that it drops must not live on here.
_compiled: list[tuple[weakref.ref[Any], tuple[weakref.ref[Tensor], ...]]] = []


def register(compiled: Compiled, weights: Iterable[Tensor]) -> None:
    """Remember what was compiled, by the parameters that it got."""
    _compiled.append((weakref.ref(compiled), tuple(weakref.ref(w) for w in weights)))


def unregister(*compiled: Compiled) -> None:
    """Forget what was compiled."""
    gone = {id(c) for c in compiled}
    _compiled[:] = [entry for entry in _compiled if id(entry[0]()) not in gone]


def compiled_for(module: nn.Module | None) -> list[Compiled]:
    """What was compiled for a module, oldest first; everything for None."""
    wanted = None if module is None else {id(t) for t in _tensors(module)}
    found: list[Compiled] = []
    alive = []
    for entry in _compiled:
        compiled, weights = entry[0](), [w() for w in entry[1]]
        if compiled is None:
            continue
        alive.append(entry)
        if wanted is None or any(w is not None and id(w) in wanted for w in weights):
            found.append(compiled)
    # What was registered twice, by old and by new parameters, is one.
    found = list({id(c): c for c in found}.values())
    _compiled[:] = alive
    return found


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def unwrap(module: Any) -> nn.Module | None:
    """The module that was compiled, from what ``torch.compile`` or ``fgc.compile`` returned.

    Raises:
        TypeError: not a module, nor a compiled one.
    """
    inner = getattr(module, "_orig_mod", module)
    inner = getattr(inner, "__self__", inner)
    if inner is not None and not isinstance(inner, torch.nn.Module):
        raise TypeError(
            f"{type(module).__name__} is not a compiled module; give what fullgraph_compile.compile or "
            "torch.compile returned"
        )
    return inner
