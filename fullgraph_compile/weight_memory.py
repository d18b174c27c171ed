"""Whether weights lie where they lay: their addresses, read without a call into torch for each."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fullgraph_compile.words import Words, places


class WeightMemory:
    """The addresses of some tensors when this was made.

    Where torch keeps an address is found by looking (``_layout``): the Python object points to a tensor, that to a
    storage, and that to the memory.  So other memory of a tensor, and of a storage, shows in one word of each.

    Args:
        tensors: the weights, or K and V of a cache, which are kept alive; their memory is not.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._pointers = addresses(tensors)
        self._objects: Words | None = None
        self._inside: Words | None = None
        self._look()

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these have the same addresses."""
        if self._objects is not None and self._inside is not None and len(tensors) == len(self._tensors):
            # What an object points to is read only if it is what was looked at: else it may be gone.
            known = tensors is self._tensors or all(map(operator.is_, tensors, self._tensors))
            if known and self._objects.same() and self._inside.same():
                self._tensors = tuple(tensors)  # the same tuple, which is known by one look from now on
                return True
        if addresses(tensors) != self._pointers:
            return False
        self._tensors = tuple(tensors)  # in the same memory
        self._look()
        return True

    def _look(self) -> None:
        if _LAYOUT is None or not all(map(_plain, self._tensors)):
            return
        to_tensor, to_storage, to_offset, to_memory = _LAYOUT
        storages = [t.untyped_storage() for t in self._tensors]
        # The words of a storage stay while it is referred to; weakly, so that its memory does not.
        self._alive = list(map(StorageWeakRef, storages))
        self._objects = Words(id(t) + to_tensor for t in self._tensors)
        self._inside = Words(
            at
            for t, storage in zip(self._tensors, storages, strict=True)
            for at in (t._cdata + to_storage, t._cdata + to_offset, storage._cdata + to_memory)
        )


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where the first element of each lies."""
    return list(map(Tensor.data_ptr, tensors))


def _plain(tensor: Tensor) -> bool:
    """Whether it is one that has a storage, with memory."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.data_ptr() != 0


# Bytes that are looked through for a word: no more than each of these takes in memory.
_OF_OBJECT, _OF_TENSOR, _OF_STORAGE = Tensor.__basicsize__, 176, 48


def _layout() -> tuple[int, int, int, int] | None:
    """Where an object has its tensor, a tensor its storage and its offset, and a storage its memory, in bytes; None if
    that is not found, or is not so for other tensors."""
    if sys.implementation.name != "cpython" or sys.maxsize < 2**32:
        return None
    with torch.inference_mode(False):
        samples = [torch.empty(n + 9)[n:] for n in (4099, 5323)]
        samples.append(nn.Parameter(torch.empty(7), requires_grad=False))
    found: list[set[int]] = []
    for sample in samples:
        storage = sample.untyped_storage()
        here = [
            places(id(sample), _OF_OBJECT, sample._cdata),
            places(sample._cdata, _OF_TENSOR, storage._cdata),
            places(sample._cdata, _OF_TENSOR, int(sample.storage_offset())),
            places(storage._cdata, _OF_STORAGE, storage.data_ptr()),
        ]
        found = [a & b for a, b in zip(found, here, strict=True)] if found else here
    if not all(found):
        return None
    # A storage on a CPU has its memory twice: what is read, and what is set free.
    to_tensor, to_storage, to_offset, to_memory = map(min, found)
    return to_tensor, to_storage, to_offset, to_memory


def _works() -> bool:
    """Tries each way in which a tensor may get other memory."""
    with torch.inference_mode(False), torch.no_grad():
        for change in (_set_data, _set_view, _resize, _swap):
            tensors = [nn.Parameter(torch.empty(8)) for _ in range(2)]
            known = WeightMemory(tensors)
            if known._inside is None or not (known._objects and known._objects.same() and known._inside.same()):
                return False
            change(tensors[1])
            if known._objects.same() and known._inside.same():
                return False
    return True


def _set_data(tensor: Tensor) -> None:
    tensor.data = torch.empty(8)


def _set_view(tensor: Tensor) -> None:
    tensor.data = tensor.data[1:]


def _resize(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(1 << 20)


def _swap(tensor: Tensor) -> None:
    torch.utils.swap_tensors(tensor, nn.Parameter(torch.empty(8)))


_LAYOUT: tuple[int, int, int, int] | None = _layout()
if not _works():
    _LAYOUT = None
