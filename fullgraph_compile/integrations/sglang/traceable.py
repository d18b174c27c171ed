"""What makes SGLang's model code traceable, and its small ops visible to the compiler, for the time of a capture.

All of it is undone when the capture ends: batches that run eagerly never see it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullgraph_compile.integrations.sglang.attention import replaced
from fullgraph_compile.integrations.sglang.release import ROOT, find

# Structs that Dynamo cannot make; the plain classes have the same fields and methods.
_STRUCTS = (
    f"{ROOT}layers.layer_boundary.residual.stream.Contribution",
    f"{ROOT}layers.layer_boundary.exit.ExitDecision",
)
_STREAMS = (torch.Stream, torch.cuda.Stream)
# Questions whose other answer leads to a kernel of SGLang's own, which no compiler could fuse, or to a second stream.
_ANSWERS: dict[str, Any] = {
    "can_use_fused_inplace_qknorm": lambda *args, **kwargs: False,
    "can_use_fused_qk_norm_cpu": lambda *args, **kwargs: False,
    "enable_fused_set_kv_buffer": lambda *args, **kwargs: False,
    "get_is_capture_mode": lambda: False,
}


@contextlib.contextmanager
def traceable(body: nn.Module) -> Iterator[None]:
    """Let ``body`` be traced: its norms, activations and rotary embeddings as torch ops."""
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            for module in _model_modules():
                if callable(vars(module).get(name)):
                    stack.enter_context(replaced(module, name, answer))
        for target in _STRUCTS:
            struct = find(target)
            if struct is not None:
                _replace_everywhere(stack, struct, plain_class(struct))
        for module in body.modules():
            # For work beside the main stream.  A trace has one stream, and Dynamo would record the object as a node.
            for name in [n for n, value in vars(module).items() if isinstance(value, _STREAMS)]:
                stack.enter_context(replaced(module, name, None))
        stack.enter_context(_native_ops(body))
        yield


def _model_modules() -> list[Any]:
    return [m for name, m in list(sys.modules.items()) if name.startswith(f"{ROOT}models.") and m is not None]


def _replace_everywhere(stack: contextlib.ExitStack, old: Any, new: Any) -> None:
    """In each module of SGLang that holds the name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("sglang.") and module is not None:
            for name in [n for n, value in list(vars(module).items()) if value is old]:
                stack.enter_context(replaced(module, name, new))


def plain_class(struct: Any) -> type:
    """A class like a ``msgspec.Struct``: the same arguments, defaults and methods."""
    names = struct.__struct_fields__
    # The defaults of the last fields.
    defaults = dict(zip(names[len(names) - len(struct.__struct_defaults__) :], struct.__struct_defaults__, strict=True))

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        for name in names:
            setattr(self, name, given[name])

    methods = {
        name: value
        for name, value in vars(struct).items()
        if not name.startswith("__") and name not in names and (callable(value) or isinstance(value, property))
    }
    return type(struct.__name__, (), {"__init__": __init__, "__module__": struct.__module__, **methods})


@contextlib.contextmanager
def _native_ops(body: nn.Module) -> Iterator[None]:
    """SGLang's own switch of its fused ops to their forms in torch ops."""
    switched: list[Any] = []
    try:
        module: Any
        for module in body.modules():
            if hasattr(module, "enter_torch_compile") and not getattr(module, "is_torch_compile", False):
                # The count decides about experts only: above one, they stay as they are.
                module.enter_torch_compile(num_tokens=16)
                switched.append(module)
        yield
    finally:
        for module in switched:
            module.leave_torch_compile()
