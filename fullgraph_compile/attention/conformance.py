"""The conformance battery: whether an attention backend can be trusted in a graph, on this machine.

Each probe records attention once, on a batch that fills the bucket, as a runner does (on the tape on a CPU, in a CUDA
graph on a GPU), replays it over other batches, and compares with dense attention in fp64.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fullgraph_compile import attention
from fullgraph_compile.attention.base import AttentionBackend
from fullgraph_compile.attention.dense import TOLERANCE
from fullgraph_compile.attention.probes import Probe, probes
from fullgraph_compile.attention.rig import play
from fullgraph_compile.graphs import CaptureError
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.progress import steps

_HEAD_SIZES = (64, 128, 32, 16, 256)
_PAGE_SIZES = (16, 64, 128, 256, 32, 8, 1)
_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}


@dataclass(frozen=True)
class ProbeResult:
    """What one probe showed.

    Attributes:
        probe: its name.
        ok: nothing was wrong; true as well where it was skipped.
        detail: what was wrong: the batch, the request and the first value.
        skipped: why it was not played: what the backend says that it does not support; empty where it was.
    """

    probe: str
    ok: bool
    detail: str = ""
    skipped: str = ""

    @property
    def word(self) -> str:
        return "not supported" if self.skipped else "ok" if self.ok else "FAILED"


@dataclass(frozen=True)
class Conformance:
    """What the battery showed of one backend on one device.

    Attributes:
        backend: its name.
        device: where it ran.
        dtype: of all probes but those that are named after another one.
        results: by probe, in the order of play; empty where the backend serves not even plain causal attention.
        unsupported: why it does not.
    """

    backend: str
    device: torch.device
    dtype: torch.dtype
    results: tuple[ProbeResult, ...] = ()
    unsupported: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the backend runs here, and all that it claims to support is right."""
        return not self.unsupported and not self.failed

    @property
    def failed(self) -> tuple[ProbeResult, ...]:
        return tuple(r for r in self.results if not r.ok)

    def __str__(self) -> str:
        where = f"{self.backend} on {self.device}, {str(self.dtype).removeprefix('torch.')}"
        if self.unsupported:
            return f"{where}: unsupported: {'; '.join(self.unsupported)}"
        played = sum(not r.skipped for r in self.results)
        table = Table("probe", "result", "detail")
        for result in self.results:
            table.add_row(result.probe, result.word, result.skipped or result.detail)
        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(f"{where}: {played} probes played, {len(self.failed)} failed", highlight=False)
        console.print(table, markup=False)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def check_attention(
    backend: str | type[AttentionBackend],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    only: Collection[str] = (),
    show_progress: bool = False,
) -> Conformance:
    """Run the conformance battery.

    A fault is a result, not an exception, and so is an exception that the backend raises.

    Args:
        backend: a registered name, or a backend's class; each recording gets an instance of its own.
        device: None = the current CUDA device if there is one and the backend runs there, else the CPU.
        dtype: None = the first that the backend supports, and the others in a probe each.
        only: names of probes, to play these alone; none = all.
        show_progress: show a bar on stderr.

    Raises:
        ValueError: no backend has this name, no probe has one of ``only``, or the dtype or the device's type is not
            one that attention is checked in.
        TypeError: not a backend's class.
    """
    name, kind = _backend(backend)
    if dtype is not None and dtype not in TOLERANCE:
        valid = ", ".join(map(str, TOLERANCE))
        raise ValueError(f"dtype={dtype} is not one that attention is checked in; valid are {valid}")
    battery = _prepare(name, kind, device, dtype)
    if isinstance(battery, Conformance):
        return battery
    return replace(battery.frame, results=tuple(battery.play(frozenset(only), show_progress)))


def register_attention(name: str, backend: type[AttentionBackend], device: torch.device | str | None = None) -> None:
    """Make a backend known by name, for ``attention=name``, once the conformance battery has found nothing wrong.

    "auto" does not take it: its order is one of measured speed.

    Args:
        name: any word but "auto" and the names that are taken.
        backend: its class, which is called without arguments.
        device: where the battery runs; None as in ``check_attention``.

    Raises:
        TypeError: not a subclass of ``AttentionBackend``, or one without a sentinel.
        ValueError: the name is taken; or the backend fails probes, which the message names; or it does not run on
            this machine, so that nothing is known of it.
    """
    attention.register(name, backend)  # first, as it says at once what is wrong with the name or the class
    try:
        found = check_attention(backend, device)
        if found.unsupported:
            raise ValueError(
                f"attention backend {name!r} is not registered: it cannot be checked on {found.device}: "
                f"{'; '.join(found.unsupported)}"
            )
        if found.failed:
            said = "; ".join(f"{r.probe}: {r.detail}" for r in found.failed)
            raise ValueError(
                f"attention backend {name!r} is not registered: on {found.device} it fails {len(found.failed)} of "
                f"{len(found.results)} probes: {said}"
            )
    except BaseException:
        attention._backends.pop(name, None)
        raise


def _backend(backend: str | type[AttentionBackend]) -> tuple[str, type[AttentionBackend]]:
    if isinstance(backend, type) and issubclass(backend, AttentionBackend):
        return getattr(backend, "name", backend.__name__), backend
    if not isinstance(backend, str):
        raise TypeError(f"{backend!r} is neither the name of an attention backend nor its class")
    if backend not in attention._backends:
        valid = ", ".join(map(repr, sorted(attention._backends)))
        raise ValueError(f"no attention backend is called {backend!r}; valid are {valid}")
    return backend, attention._backends[backend]


def _devices(device: torch.device | str | None) -> list[torch.device]:
    cuda = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    if device is None:
        return [*cuda, torch.device("cpu")]
    device = torch.device(device)
    if device.type not in _DTYPES:
        raise ValueError(f"device={str(device)!r} is not one that attention is checked on; valid are cpu and cuda")
    return cuda if cuda and device.type == "cuda" and device.index is None else [device]


def _prepare(
    name: str, kind: type[AttentionBackend], device: torch.device | str | None, dtype: torch.dtype | None
) -> _Battery | Conformance:
    """The first device, dtype and head size in which the backend serves plain causal attention."""
    first: Conformance | None = None
    for place in _devices(device):
        for number in _DTYPES[place.type] if dtype is None else (dtype,):
            for size in _HEAD_SIZES:
                site = AttentionSite(
                    index=0, node="probe", module="", heads=4, kv_heads=4, head_size=size, value_head_size=size,
                    scale=size**-0.5, dtype=number,
                )  # fmt: skip
                why = kind().supports(site, place)
                if not why:
                    others = tuple(d for d in _DTYPES[place.type] if d != number) if dtype is None else ()
                    return _Battery(kind, site, place, others, Conformance(name, place, number))
                first = first or Conformance(name, place, number, unsupported=tuple(why))
    assert first is not None
    return first


@dataclass(frozen=True)
class _Battery:
    """The probes of one backend on one device.

    Attributes:
        kind: the backend.
        base: plain causal attention, from which all probes' sites differ by what they probe.
        device: where it runs.
        others: dtypes beside the base site's.
        frame: the result, without results.
    """

    kind: type[AttentionBackend]
    base: AttentionSite
    device: torch.device
    others: tuple[torch.dtype, ...]
    frame: Conformance

    def play(self, only: frozenset[str], show_progress: bool) -> Iterator[ProbeResult]:
        """Play all probes, first with keys as arguments, then with keys in pages."""
        page_size, no_pages = self._page_size()
        battery = probes(lambda changes: not self._unsupported((changes,)), self.others)
        jobs: dict[str, tuple[Probe, int | None]] = {}
        for probe in battery if self.kind.packed else ():
            if "packed" in probe.layouts:
                jobs[probe.name] = (probe, None)
        for probe in battery if page_size else ():
            if "paged" in probe.layouts:
                jobs[f"{probe.name}, paged" if "packed" in probe.layouts else probe.name] = (probe, page_size)
        unknown = only - jobs.keys()
        if unknown:
            valid = ", ".join(map(repr, jobs))
            raise ValueError(f"{self.frame.backend} has no probe {', '.join(map(repr, unknown))}; valid are {valid}")
        if no_pages and not only:
            yield ProbeResult("pages", True, skipped=no_pages)
        lost = ""
        chosen = {name: job for name, job in jobs.items() if not only or name in only}
        for name, job in steps(chosen.items(), f"checking {self.frame.backend}", show=show_progress, total=len(chosen)):
            if lost:
                yield ProbeResult(name, False, f"not played: {lost}")
                continue
            yield replace(self._probe(*job), probe=name)
            lost = self._lost(name)

    def _probe(self, probe: Probe, page_size: int | None) -> ProbeResult:
        """The first trial that is wrong decides; what the backend does not support is no fault."""
        reasons: list[str] = []
        played = 0
        for trial in probe.trials:
            why = self._unsupported(trial.sites)
            if page_size is not None and not why:
                why = self._unsupported_pages(trial.page_size or page_size)
            if why:
                reasons.append(why)
                continue
            played += 1
            try:
                wrong = play(trial, self.kind(), self.base, self.device, page_size)
            except CaptureError as error:
                wrong = f"it cannot be captured: {error}"
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error).strip() or 'without a message'}"
            if wrong:
                return ProbeResult(probe.name, False, wrong)
        return ProbeResult(probe.name, True, skipped="" if played else reasons[0])

    def _unsupported(self, sites: tuple[Mapping[str, Any], ...]) -> str:
        backend = self.kind()
        why = [reason for changes in sites for reason in backend.supports(replace(self.base, **changes), self.device)]
        return "; ".join(dict.fromkeys(why))

    def _unsupported_pages(self, page_size: int) -> str:
        """What a backend says of a page size."""
        return "; ".join(self.kind().supports_pages(page_size, self.device))

    def _page_size(self) -> tuple[int | None, str]:
        """The page size of all probes but those that are named after another one; or why there is none."""
        if not self.kind.paged:
            return None, "it reads no paged cache"
        if self.base.dtype == torch.float64:
            return None, "a paged cache holds no float64"
        reasons = [self._unsupported_pages(size) for size in _PAGE_SIZES]
        size = next((size for size, why in zip(_PAGE_SIZES, reasons, strict=True) if not why), None)
        return size, "" if size else reasons[0]

    def _lost(self, probe: str) -> str:
        """Whether nothing can run on the device any more."""
        if self.device.type != "cuda":
            return ""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            return f"{probe!r} has made the device unusable ({str(error).splitlines()[0]})"
        return ""
