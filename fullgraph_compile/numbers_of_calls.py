"""Arguments of a call that are numbers, or tensors of one number, for whose value a trace may be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Dynamo takes ``item()`` of these for a number that it may guard on.
_ITEMS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.float64})


def is_number(value: Any) -> bool:
    """A number whose value a trace may or may not depend on."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number_of(value: Any) -> Any:
    """The number that an argument is, or holds where a trace may be for that value alone; None if there is none."""
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 and value.dtype in _ITEMS and value.device.type == "cpu" else None
    return value if is_number(value) else None
