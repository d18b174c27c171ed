"""Calls that no replay can repeat are refused by name while recording: host reads, and other memory for a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fullgraph_compile.graphs.base import CaptureError

# Host reads that reach the dispatcher.  Under inference_mode composite ops arrive whole, else as what they are made of.
_HOST_OPS = frozenset(
    {"item", "is_nonzero", "_local_scalar_dense", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
     "masked_select", "bincount", "_unique", "_unique2", "unique_dim", "unique_consecutive", "_linalg_check_errors",
     "where.default", "tensor_split.tensor_indices_or_sections"}
)  # fmt: skip
# Host reads that do not: the tensor's memory is read straight from Python.
_HOST_CALLS = {
    getattr(Tensor, name): name
    for name in ("item", "tolist", "numpy", "__array__", "__dlpack__", "__bool__", "__int__", "__float__",
                 "__complex__", "__index__", "__repr__", "__format__")
}  # fmt: skip
_REBIND_OPS = frozenset({"set_", "set_data", "resize_", "resize_as_", "_resize_output_"})
_INDEX_OPS = frozenset(
    {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
)  # fmt: skip


class HostReads(TorchFunctionMode):
    """Refuses the host reads that never reach the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_CALLS:
            raise CaptureError(f"Tensor.{_HOST_CALLS[func]} reads a tensor on the host, which a replay does not repeat")
        return func(*args, **(kwargs or {}))


def refuse(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for an op that no replay can repeat.

    Raises:
        CaptureError: it reads a tensor on the host, or gives one other memory.
    """
    name = func._schema.name.partition("::")[2]
    if name in _HOST_OPS or f"{name}.{func._overloadname or 'default'}" in _HOST_OPS:
        raise CaptureError(f"{func} reads a tensor on the host, which a replay does not repeat")
    if name == "repeat_interleave" and func._overloadname != "self_int" and kwargs.get("output_size") is None:
        raise CaptureError(f"{func} reads its output's size on the host; give it output_size")
    if name in _REBIND_OPS:
        raise CaptureError(f"{func} gives a tensor other memory, which a replay does not see")
    masks = (torch.bool, torch.uint8)
    if name in _INDEX_OPS and any(isinstance(t, Tensor) and t.dtype in masks for t in tree_leaves(args[1])):
        values = args[2] if len(args) > 2 else kwargs.get("values")
        # One value for all that a mask selects is a fill, and needs no positions.
        if values is None or values.numel() != 1 or (len(args) > 3 and args[3]) or kwargs.get("accumulate"):
            raise CaptureError(f"{func} with a boolean mask reads its output's size on the host")
