"""The tape: a CPU double of graph replay.

It records the ops of one run with every Python value frozen, and replays the same ops on the same storages.  What a
CUDA graph would do wrong on a GPU, it does wrong here, on a CPU: a number that should have changed keeps its value, a
buffer that was rebound is not seen, an output is overwritten by the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fullgraph_compile.graphs.base import CaptureError, GraphRecorder, RecordedGraph, watched_below

_HOST_READS = frozenset(
    {"item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
     "unique_consecutive", "allclose", "repeat_interleave.Tensor"}
)  # fmt: skip
_REBINDS = frozenset({"set_", "resize_", "resize_as_"})
# Reads of the host that never reach the dispatcher.
_PYTHON_READS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__dlpack__", "__bool__", "__int__", "__float__", "__index__", "cpu"}
)
_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})


class _HostReads(TorchFunctionMode):
    """Refuses what would read a tensor on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _PYTHON_READS and name != "cpu":
            raise CaptureError(f"Tensor.{name}() reads a tensor on the host, which a replay does not do again")
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _poison(tensor: Tensor) -> None:
    """Fill with what no run would compute."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.created: dict[int, Tensor] = {}
        self.opaque: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in _HOST_READS or f"{name}.{func._overloadname}" in _HOST_READS:
            raise CaptureError(f"{func} reads a tensor on the host, which a replay does not do again")
        if name in _REBINDS:
            raise CaptureError(f"{func} gives a tensor other memory, which a replay does not see")
        if func.namespace not in ("aten", "prims"):
            for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CompositeExplicitAutograd):
                # Asking for a kernel that is not there crashes the process.
                if func.has_kernel_for_dispatch_key(key):
                    with self:
                        return func._op_dk(key, *args, **kwargs)
            self.opaque.append(str(func))
        inputs = {_storage(t) for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        fresh = [t for t in _tensors(out) if _storage(t) not in inputs]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if fresh or writes:
            for t in fresh:
                self.created.setdefault(_storage(t), t)
            self.calls.append((func, args, kwargs, out))
        return out


class Tape(RecordedGraph):
    """One recorded run.

    Attributes:
        nodes: calls that a replay makes.
        opaque: custom ops that could only be recorded as one call each.
    """

    def __init__(self, recorder: TapeRecorder, log: _Recorder) -> None:
        self._recorder = recorder
        self._calls = log.calls
        self._scratch = [_whole(t) for t in log.created.values()]
        self.opaque = tuple(log.opaque)
        self.nodes = len(log.calls)

    def poison(self) -> None:
        """What another graph of the pool may do to this one's memory."""
        for tensor in self._scratch:
            _poison(tensor)

    def replay(self) -> None:
        if not self._calls:
            raise RuntimeError("this tape was closed")
        with torch.no_grad():
            for other in self._recorder.tapes:
                if other is not self:
                    other.poison()
            for func, args, kwargs, out in self._calls:
                name = func._schema.name.partition("::")[2]
                if name in _EMPTY:
                    _poison(out)
                    continue
                inputs = {_storage(t) for t in _tensors((args, kwargs))}
                again = func(*args, **kwargs)
                for recorded, new in zip(_tensors(out), _tensors(again), strict=True):
                    if _storage(recorded) not in inputs:
                        recorded.copy_(new)

    def close(self) -> None:
        self._calls = []
        self._scratch = []
        self._recorder.tapes = [t for t in self._recorder.tapes if t is not self]


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, (size,), (1,))


class TapeRecorder(GraphRecorder):
    """Records on the CPU."""

    name = "tape"

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, run: Callable[[], None]) -> Tape:
        log = _Recorder()

        @contextmanager
        def watch() -> Iterator[None]:
            # The mode outside is popped while it handles the call that we are in.
            with _HostReads():
                yield

        with torch.no_grad(), watched_below(watch), _HostReads(), log:
            run()
        tape = Tape(self, log)
        self._check(tape, log)
        self.tapes.append(tape)
        return tape

    @staticmethod
    def _check(tape: Tape, log: _Recorder) -> None:
        """Replay over poisoned scratch: whatever bypassed the recorder shows as a difference."""
        written = [t for func, args, _, _ in log.calls for t in _written(func, args)]
        static = {_storage(t): t for t in written if _storage(t) not in log.created}
        before = {key: t.clone() for key, t in static.items()}
        tape.poison()
        tape.replay()
        for key, tensor in static.items():
            if not torch.equal(torch.nan_to_num(tensor.double()), torch.nan_to_num(before[key].double())):
                raise CaptureError(
                    "a replay gives other values than the run that was recorded: a part of it was not seen by the "
                    "recorder (a compiled piece?), or it is not the same when it runs twice"
                )

    def close(self) -> None:
        for tape in list(self.tapes):
            tape.close()


def _written(func: Any, args: Any) -> list[Tensor]:
    return [
        args[i]
        for i, a in enumerate(func._schema.arguments)
        if i < len(args) and a.alias_info is not None and a.alias_info.is_write and isinstance(args[i], Tensor)
    ]
