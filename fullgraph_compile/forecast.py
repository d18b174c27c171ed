"""Device memory that graphs will take, before any is captured: two small buckets are run, and the rest is a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullgraph_compile.measured_ladder import Forecast

if TYPE_CHECKING:
    from fullgraph_compile.capture import CaptureSet
    from fullgraph_compile.graphs import GraphRecorder

# Device memory of an instantiated graph, for each of its nodes: a kernel's arguments and its launch record.
NODE_BYTES = 4096

# The two sizes that are run: large enough that rounding of small allocations does not count.
PROBES = (128, 512)


def probe_sizes(ladder: Sequence[int]) -> tuple[int, ...]:
    """The buckets to run: for each of ``PROBES`` the largest that is not above it, else the smallest there is."""
    return tuple(sorted({max((b for b in ladder if b <= most), default=ladder[0]) for most in PROBES}))


def forecast(probes: CaptureSet, recorder: GraphRecorder, args: Sequence[Any], metadata: int) -> Forecast:
    """What a ladder over the same body, and the same KV cache, will take.

    Must be called within the recorder's session, after which the caller closes the set.

    Args:
        probes: a set of one or two small buckets; the smallest is captured, for the number of its nodes.
        args: values of the placeholders.
        metadata: bytes of the metadata block of the whole ladder.
    """
    device = probes.device
    allocated = _allocated(device)
    for bucket in probes.buckets.values():
        probes.run_of(bucket, args)()
    # Workspaces that are made at the first run and stay.
    retained = _allocated(device) - allocated
    peaks = {tokens: peak_bytes(probes.run_of(bucket, args), device) for tokens, bucket in probes.buckets.items()}
    small, large = min(peaks), max(peaks)
    row = peaks[large] / large
    if small < large:
        row = max(0.0, (peaks[large] - peaks[small]) / (large - small))
    fixed = max(0.0, peaks[large] - row * large) + retained + metadata
    static_row, static = probes.static_bytes()
    probes.buckets[small].graph = graph = recorder.record(probes.run_of(probes.buckets[small], args))
    return Forecast(fixed + static, row + static_row, (graph.nodes or 0) * NODE_BYTES)


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Most bytes of intermediate values that one run holds at once."""
    if device.type == "cuda":
        before = _allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    meter = _Meter()
    with meter:
        run()
    return meter.peak


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


class _Meter(TorchDispatchMode):
    """Bytes of the storages that ops make while it is on, and most of them alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(t)._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        self._live = {key: (ref, n) for key, (ref, n) in self._live.items() if not ref.expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := _storage(tensor))._cdata not in given:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(n for _, n in self._live.values()))
        return out


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
