"""The first node of each graph: a call's inputs, copied from where the caller has them to where the graph reads them.

A launch takes no arguments.  So where a call's inputs lie is written with its metadata, in one copy, and the graph
itself fetches them: the host makes no copy of its own for each, nor zeroes what a longer call has left.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.graphs.base import opaque

# Triton's language, as the kernel below names it.  Set when the kernel is first made, as a machine without Triton has
# none.
tl: Any = None

# Elements that one program of the kernel copies.
_BLOCK = 1024


class InputRows:
    """The inputs of one bucket that have a token dim.

    Args:
        inputs: the static inputs, contiguous.
        dims: token dim of each.
        addresses: int64, one of each input: where the first element of the call's own lies, which is contiguous, with
            the dtype of the static one and its shape but for the token dim; 0 = there is none.
        real: one int32: tokens of the call.
    """

    def __init__(self, inputs: Sequence[Tensor], dims: Sequence[int], addresses: Tensor, real: Tensor) -> None:
        self.inputs = list(inputs)
        self.dims = list(dims)
        self.addresses = addresses
        self.real = real
        self._rows = inputs[0].shape[dims[0]] if inputs else 0
        # Of each: where it lies, elements in a row, elements in all, bytes of an element.
        table = []
        for tensor, dim in zip(inputs, dims, strict=True):
            size = tensor.element_size()
            width = size if size in (1, 2, 4, 8) else 1
            units = size // width
            table.append((tensor.data_ptr(), tensor.shape[dim + 1 :].numel() * units, tensor.numel() * units, width))
        self._most = max((row[2] for row in table), default=0)
        on_gpu = addresses.device.type == "cuda"
        self._table = torch.tensor(table, dtype=torch.int64, device=addresses.device) if on_gpu and table else None

    def copy(self) -> None:
        """Copy the real rows of each input, and zero those after them; to be recorded."""
        if self._table is None:
            _copy(self.addresses, self.real, self.inputs, self.dims)
            return
        kernel = _kernel()
        assert kernel is not None
        # Triton launches on the current device, which need not be the model's.
        with torch.cuda.device(self.addresses.device):
            kernel[(-(-self._most // _BLOCK), len(self.inputs))](
                self.addresses, self.real, self._table, self._rows, BLOCK=_BLOCK, WIDE=self._most >= 2**31
            )


def recordable(device: torch.device) -> bool:
    """Whether a graph can fetch its inputs: on a GPU a kernel in Triton does that, which must be installed."""
    return device.type != "cuda" or _kernel() is not None


@opaque
def _copy(addresses: Tensor, real: Tensor, inputs: list[Tensor], dims: list[int]) -> None:
    tokens = int(real)
    for tensor, dim, address in zip(inputs, dims, addresses.tolist(), strict=True):
        tensor.narrow(dim, tokens, tensor.shape[dim] - tokens).zero_()
        rows = tensor.narrow(dim, 0, tokens)
        if address:
            memory = (ctypes.c_char * (rows.numel() * rows.element_size())).from_address(address)
            rows.copy_(torch.frombuffer(memory, dtype=tensor.dtype).view(rows.shape))
        else:
            rows.zero_()


@functools.cache
def _kernel() -> Any:
    """The compiled kernel, or None where Triton is not installed."""
    global tl, _move
    try:
        import triton
        import triton.language
    except ImportError:
        return None
    tl, _move = triton.language, triton.jit(_move)
    return triton.jit(_copy_rows, do_not_specialize=["rows"])


def _copy_rows(addresses, real, table, rows, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    job = tl.program_id(1)
    # Every load is on its way before any is waited for.
    source = tl.load(addresses + job)
    real_rows = tl.load(real)
    to = tl.load(table + 4 * job)
    in_row = tl.load(table + 4 * job + 1)
    size = tl.load(table + 4 * job + 2)
    width = tl.load(table + 4 * job + 3)
    first = tl.program_id(0)
    if WIDE:
        at = first.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        at = first * BLOCK + tl.arange(0, BLOCK)
        in_row = in_row.to(tl.int32)
    row = at // in_row
    before = row // rows  # of what is in front of the token dim
    row = row % rows
    inside = at < size
    given = inside & (row < real_rows) & (source != 0)
    start = at - (before * (rows - real_rows)) * in_row
    if width == 8:
        _move(source, start, to, at, given, inside, tl.int64)
    elif width == 4:
        _move(source, start, to, at, given, inside, tl.int32)
    elif width == 2:
        _move(source, start, to, at, given, inside, tl.int16)
    else:
        _move(source, start, to, at, given, inside, tl.int8)


def _move(source, start, to, at, given, inside, KIND: tl.constexpr):
    values = tl.load(source.to(tl.pointer_type(KIND)) + start, mask=given, other=0)
    tl.store(to.to(tl.pointer_type(KIND)) + at, values, mask=inside)
