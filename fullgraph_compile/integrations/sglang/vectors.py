"""SGLang's vectors of request slots, rewritten by two or three launches a batch where SGLang takes twelve.

SGLang copies or clears a dozen slices one after another before each replay, which is a good part of what a short
prefill waits for.  While it loads a batch, its vectors are stand-ins that note what is asked of them; ``flush`` does
all of it.  Whatever else is asked of a stand-in finds the slice itself, with all that was noted before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class DeferredVectors(Mapping[str, Any]):
    """Stand-ins for SGLang's vectors.

    Args:
        vectors: ``[slots or more]`` each, on one device; their memory is what is written.
    """

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        self._vectors = {name: _Vector(self, tensor) for name, tensor in vectors.items()}
        some = next(iter(vectors.values()))
        with torch.inference_mode(False):
            self.zeros = torch.zeros_like(some)
        self.pending: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    def __getitem__(self, name: str) -> Any:
        return self._vectors[name]

    def __iter__(self) -> Any:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def note(self, to: Tensor, source: Tensor) -> None:
        """``to.copy_(source)``, later; slices that are noted do not overlap."""
        if source.device != to.device or source.shape != to.shape:
            to.copy_(source)
            return
        copies = self.pending.setdefault(source.dtype, ([], []))
        copies[0].append(to)
        copies[1].append(source)

    def flush(self) -> None:
        """Do what was noted, on the current stream."""
        if self.pending:
            pending, self.pending = self.pending, {}
            for to, sources in pending.values():
                torch._foreach_copy_(to, sources)


class _Vector:
    def __init__(self, owner: DeferredVectors, tensor: Tensor) -> None:
        self._owner, self._tensor = owner, tensor
        self._parts: dict[tuple[Any, Any], _Part] = {}

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice) or index.step is not None:
            self._owner.flush()
            return self._tensor[index]
        key = (index.start, index.stop)
        if key not in self._parts:
            self._parts[key] = _Part(self._owner, self._tensor[index])
        return self._parts[key]

    def __getattr__(self, name: str) -> Any:
        self._owner.flush()
        return getattr(self._tensor, name)


class _Part:
    """A slice that is written later."""

    def __init__(self, owner: DeferredVectors, view: Tensor) -> None:
        self._owner, self._view = owner, view
        self._zeros = owner.zeros[: view.shape[0]]

    def copy_(self, source: Tensor, *args: Any, **kwargs: Any) -> None:
        self._owner.note(self._view, source)

    def zero_(self) -> None:
        self._owner.note(self._view, self._zeros)

    def fill_(self, value: Any) -> None:
        self._view.fill_(value)

    def __getattr__(self, name: str) -> Any:
        self._owner.flush()
        return getattr(self._view, name)


def defer(runner: Any) -> Callable[[], None]:
    """Let a prefill runner load its batches by way of stand-ins.

    Returns:
        what must be called before a batch's metadata is prepared, while it is loaded.
    """
    real, load = runner._prefill_static_buffers, runner.load_batch
    deferred = DeferredVectors(real)

    def loaded() -> None:
        deferred.flush()
        runner._prefill_static_buffers = real

    def load_batch(*args: Any, **kwargs: Any) -> Any:
        deferred.pending.clear()
        runner._prefill_static_buffers = deferred
        try:
            return load(*args, **kwargs)
        finally:
            loaded()

    runner.load_batch = load_batch
    return loaded
