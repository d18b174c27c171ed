"""Views of a tensor that are asked for again and again: one costs as much as a small copy, and is before a launch."""

from __future__ import annotations

import torch
from torch import Tensor


class Views:
    """The first elements of a tensor along its last dim, of lengths that come again.

    Args:
        tensor: of any dims.
    """

    # More than these are forgotten.
    MOST = 4096

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._first: dict[int, Tensor] = {}

    def first(self, count: int) -> Tensor:
        """The first ``count``."""
        view = self._first.get(count)
        if view is None:
            with torch.inference_mode(False):
                view = self.tensor.narrow(-1, 0, count)
            if type(view) is Tensor:  # not one of a mode that the caller is in
                if len(self._first) >= self.MOST:
                    self._first.clear()
                self._first[count] = view
        return view
