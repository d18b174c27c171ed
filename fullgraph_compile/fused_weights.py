"""Parameters that lie one after the other in memory, so that one linear can read several of them as one weight.

Each stays a parameter of its own, at its place in the module and with its own shape: it only becomes a view of rows of
a storage that it shares with its siblings.  So no memory is doubled, and state dicts, saving and loading in place keep
working.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.passes.fuse_projections import Stack
from fullgraph_compile.program import Program
from fullgraph_compile.report import log

# Memory that is set free in parts may be of no use to the next storage: on a GPU it is given back this often.
_GIVE_BACK = 256 << 20


@dataclass(frozen=True)
class _Joined:
    """A storage that was made here, and the parameters that were put into it."""

    parts: tuple[weakref.ref[Tensor], ...]
    storage: int

    def alive(self) -> list[Tensor]:
        return [p for ref in self.parts if (p := ref()) is not None]

    def holds(self, part: Tensor) -> bool:
        """Whether one of the parameters still lies there."""
        return part.untyped_storage().data_ptr() == self.storage


class FusedWeights:
    """The parameters of one module that share storages.

    Args:
        module: the module; only its own, plain, unshared parameters are ever moved.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self._joined: list[_Joined] = []
        self._freed = 0

    def admit(self, values: Sequence[Any]) -> Callable[[Sequence[Stack]], bool]:
        """For a trace with these values of its placeholders: join the parameters of some stacks, all or none."""
        refusal = self._refusals()

        def join(stacks: Sequence[Stack]) -> bool:
            parts = [[values[i] for i in stack] for stack in stacks]
            whys = [refusal(p) for p in parts]
            if any(whys):
                log.info("projections are not fused: %s", next(filter(None, whys)))
                return False
            return all(self._join(p) for p in parts)

        return join

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The parameters as one tensor: a view if they are joined, or may be now; else a copy.

        They are not joined any more once one was replaced or moved.
        """
        if not _adjacent(parts):
            why = self._refusals()(parts)
            if why or not self._join(parts):
                log.info("fused projections are copied at each call: %s", why or "no memory for them")
                return torch.cat([p.detach() for p in parts])
        first = parts[0]
        rows = sum(p.shape[0] for p in parts)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())

    def undo(self) -> None:
        """Give each parameter a storage of its own again."""
        with torch.inference_mode(False), torch.no_grad():
            for joined in self._joined:
                for part in filter(joined.holds, joined.alive()):
                    part.data = part.detach().clone(memory_format=torch.contiguous_format)
                    self._gave(part)
        self._joined.clear()

    def _refusals(self) -> Callable[[Sequence[Any]], str]:
        """Why some parameters may not be joined; the empty string = they may."""
        module = self.module()
        if module is None:
            return lambda parts: "the module is gone"
        uses: Counter[int] = Counter()
        managed: set[int] = set()
        for part in module.modules():
            own = [id(p) for p in part._parameters.values()]
            uses.update(own)
            if hasattr(part, "_hf_hook"):
                managed.update(own)  # accelerate moves its weights between calls
        joined = {id(p): j for j in self._joined for p in j.alive()}

        def why(parts: Sequence[Any]) -> str:
            if _adjacent(parts):
                return ""
            first = parts[0]
            for p in parts:
                if type(p) is not nn.Parameter or p.layout is not torch.strided or p.is_meta or p.is_inference():
                    return f"a weight is a {type(p).__name__}, not a plain parameter with memory"
                if uses[id(p)] != 1 or id(p) in managed:
                    return "a weight has several places in the module, or is managed by a hook"
                if (p.dtype, p.device) != (first.dtype, first.device):
                    return "weights differ in dtype or device"
                ours = id(p) in joined and joined[id(p)].holds(p)
                if not p.is_contiguous() or not (ours or _owns_storage(p)):
                    return "a weight shares memory with another tensor"
            return ""

        return why

    def _join(self, parts: Sequence[Tensor]) -> bool:
        """Move parameters into one storage.  Each is moved before the next is copied, so one group is the most that
        is held twice."""
        if _adjacent(parts):
            return True
        first = parts[0]
        on_gpu = first.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return False
        rows = sum(p.shape[0] for p in parts)
        with torch.inference_mode(False), torch.no_grad():
            try:
                whole = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
            except torch.OutOfMemoryError:
                return False
            if on_gpu:
                # A stream of the caller's may still read the memory that is about to be set free.
                torch.cuda.synchronize(first.device)
            at = 0
            for p in parts:
                there = whole[at : at + p.shape[0]]
                there.copy_(p.detach())
                p.data = there
                self._gave(p)
                at += p.shape[0]
        self._joined = [j for j in self._joined if any(map(j.holds, j.alive()))]
        self._joined.append(_Joined(tuple(map(weakref.ref, parts)), whole.untyped_storage().data_ptr()))
        return True

    def _gave(self, part: Tensor) -> None:
        """Count memory that a parameter has left."""
        if part.device.type != "cuda":
            return
        self._freed += part.nbytes
        if self._freed >= _GIVE_BACK:
            self._freed = 0
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class FusedProgram(Program):
    """A program some of whose inputs stand for several parameters.

    Attributes:
        stacks: those parameters, by index; the first is the input that stands for all.
        weights: joins them where they are apart.
    """

    stacks: tuple[Stack, ...]
    weights: FusedWeights

    def prepare(self, inputs: Sequence[Any]) -> None:
        self.joined(inputs)

    def run(self, inputs: Sequence[Any], static: StaticBatch) -> list[Tensor]:
        return super().run(self.joined(inputs), static)

    def joined(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with whole stacks in place of their first parts.

        They are made anew from the parameters that the call gives, so a replaced one is never read stale.
        """
        values = list(inputs)
        for stack in self.stacks:
            values[stack[0]] = self.weights.whole([inputs[i] for i in stack])
        return values


def _adjacent(parts: Sequence[Any]) -> bool:
    """Whether tensors lie one after the other in one storage."""
    if not all(isinstance(p, Tensor) and not p.is_meta for p in parts):
        return False
    first = parts[0]
    start = at = first.data_ptr()
    for p in parts:
        if p.data_ptr() != at or p.dtype != first.dtype or p.shape[1:] != first.shape[1:] or not p.is_contiguous():
            return False
        at += p.nbytes
    storage = first.untyped_storage()
    return at - start <= storage.nbytes() - (start - storage.data_ptr())


def _owns_storage(tensor: Tensor) -> bool:
    """Whether nothing else shows the tensor's memory, or a part of it."""
    storage = tensor.untyped_storage()
    shown_by = torch._C._storage_Use_Count(storage._cdata) - 1  # beside the object at hand
    by_processes = storage.device.type == "cpu" and storage.is_shared()
    return storage.nbytes() == tensor.nbytes and shown_by == 1 and not by_processes
