"""The first and the last node of each graph: a call's inputs copied from where the caller has them, its results to
where the caller gets them.

A launch takes no arguments.  So where a call's inputs lie, and where its results go, is written with its metadata, in
one copy, and the graph itself fetches and brings them: the host makes no copy of its own for each, nor zeroes what a
longer call has left.
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


class CallerRows:
    """The static inputs, or the static outputs, of one bucket that have a token dim, and where the caller's own are.

    The caller's own are contiguous, with the dtype of the static one and its shape but for the token dim.

    Args:
        tensors: the static ones, contiguous.
        dims: token dim of each.
        addresses: int64, of each: where the first element of the caller's own lies; 0 = there is none.
        real: one int32: tokens of the call.
        fetch: True copies real rows from the caller's own, zeros if there is none, and zeroes the rows after them.
            False copies real rows to the caller's own, which begin at a multiple of 8 bytes.
    """

    def __init__(
        self, tensors: Sequence[Tensor], dims: Sequence[int], addresses: Tensor, real: Tensor, *, fetch: bool
    ) -> None:
        self.tensors = list(tensors)
        self.dims = list(dims)
        self.addresses = addresses
        self.real = real
        self.fetch = fetch
        self._rows = tensors[0].shape[dims[0]] if tensors else 0
        # Of each: where it lies, elements in a row, elements in all, bytes of an element.
        table = []
        for tensor, dim in zip(tensors, dims, strict=True):
            row = tensor.shape[dim + 1 :].numel() * tensor.element_size()
            # No more is known of where a tensor of the caller begins than that its elements lie at their own size.
            width = _width(tensor.element_size() if fetch else row)
            table.append((tensor.data_ptr(), max(1, row // width), tensor.nbytes // width, width))
        self._most = max((row[2] for row in table), default=0)
        on_gpu = addresses.device.type == "cuda"
        self._table = torch.tensor(table, dtype=torch.int64, device=addresses.device) if on_gpu else None

    def copy(self) -> None:
        """To be recorded."""
        if self._most == 0:
            return
        if self._table is None:
            _copy(self.addresses, self.real, self.tensors, self.dims, self.fetch)
            return
        kernel = _kernel()
        assert kernel is not None
        # Triton launches on the current device, which need not be the model's.
        with torch.cuda.device(self.addresses.device):
            kernel[(-(-self._most // _BLOCK), len(self.tensors))](
                self.addresses,
                self.real,
                self._table,
                self._rows,
                BLOCK=_BLOCK,
                WIDE=self._most >= 2**31,
                FETCH=self.fetch,
            )


def recordable(device: torch.device) -> bool:
    """Whether a graph can make such copies: on a GPU a kernel in Triton does that, which must be installed."""
    return device.type != "cuda" or _kernel() is not None


def _width(size: int) -> int:
    """Bytes of the largest integer that so many bytes can be copied as."""
    return next(width for width in (8, 4, 2, 1) if size % width == 0)


@opaque
def _copy(addresses: Tensor, real: Tensor, tensors: list[Tensor], dims: list[int], fetch: bool) -> None:
    (tokens,) = real.tolist()
    for tensor, dim, address in zip(tensors, dims, addresses.tolist(), strict=True):
        rows = tensor.narrow(dim, 0, tokens)
        own = None
        if address:
            memory = (ctypes.c_char * rows.nbytes).from_address(address)
            own = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(rows.shape)
        if not fetch:
            if own is not None:
                own.copy_(rows)
            continue
        tensor.narrow(dim, tokens, tensor.shape[dim] - tokens).zero_()
        if own is None:
            rows.zero_()
        else:
            rows.copy_(own)


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


def _copy_rows(addresses, real, table, rows, BLOCK: tl.constexpr, WIDE: tl.constexpr, FETCH: tl.constexpr):
    job = tl.program_id(1)
    # Every load is on its way before any is waited for.
    callers = tl.load(addresses + job)
    real_rows = tl.load(real)
    static = tl.load(table + 4 * job)
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
    given = inside & (row < real_rows) & (callers != 0)
    # The caller's own have real rows only.
    own_at = at - before * (rows - real_rows) * in_row
    if width == 8:
        _move(callers, own_at, static, at, given, inside, tl.int64, FETCH)
    elif width == 4:
        _move(callers, own_at, static, at, given, inside, tl.int32, FETCH)
    elif width == 2:
        _move(callers, own_at, static, at, given, inside, tl.int16, FETCH)
    else:
        _move(callers, own_at, static, at, given, inside, tl.int8, FETCH)


def _move(callers, own_at, static, at, given, inside, KIND: tl.constexpr, FETCH: tl.constexpr):
    own, ours = callers.to(tl.pointer_type(KIND)) + own_at, static.to(tl.pointer_type(KIND)) + at
    if FETCH:
        tl.store(ours, tl.load(own, mask=given, other=0), mask=inside)
    else:
        tl.store(own, tl.load(ours, mask=given, other=0), mask=given)
