"""Bodies, batches and checks that the tests of reported faults share."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason, attention
from fullgraph_compile.attention import AttentionBackend
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.batch import PrefillBatch, StaticBatch
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.registry import compiled_for, unwrap
from fullgraph_compile.staging import Poison
from tests.models import T2, tokens

TAPE: dict[str, Any] = {"graphs": "tape", "compiler": "eager"}

# What the static buffers hold before each staging.  No one dress shows every word that is not rewritten: an offset
# past the end reads as "no more requests", so a stale tail may pass for a clean one.
DRESSES = (None, Poison.IMPOSSIBLE, Poison.PLAUSIBLE)


# -- an attention backend that watches ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One call of ``Watched.run``: what a kernel would get as plain numbers."""

    site: AttentionSite
    rows: int
    static: StaticBatch


@dataclass
class Watched(ReferenceAttention):
    """The reference, which checks every batch that is staged and remembers it, and every run.

    A replay runs no Python, so ``runs`` grows while warming up, capturing, and at exact sizes only.
    """

    planned: list[tuple[list[int], StaticBatch]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def plan(self, batch: PrefillBatch, static: StaticBatch, sites: Sequence[AttentionSite]) -> None:
        check_staged(batch, static)
        self.planned.append((list(batch.new_tokens), static))

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Any, slopes: Any, site: Any, static: StaticBatch) -> Tensor:
        self.runs.append(Run(site, q.shape[0], static))
        return super().run(q, k, v, sinks, slopes, site, static)


def check_staged(batch: PrefillBatch, static: StaticBatch) -> None:
    """Every vector has its full length, every tail its sentinel, and every bound holds."""
    new, slots = list(batch.new_tokens), static.slots
    total, unused = sum(new), slots - len(new)
    offsets = [sum(new[:i]) for i in range(len(new) + 1)] + [total] * unused
    assert unused >= 0
    assert static.cu_q.tolist() == static.cu_k.tolist() == offsets
    assert static.q_lens.tolist() == static.k_lens.tolist() == new + [0] * unused
    assert static.pad_cu_q.tolist() == [*offsets, static.tokens]
    assert static.pad_cu_k.tolist() == [*offsets, total]
    assert static.num_real_tokens.tolist() == [total]
    assert total <= static.tokens
    assert max(new) <= min(static.max_q, static.max_k)
    assert static.max_q > 1, "a bound of 1 makes some kernels take their path for decoding"
    assert static.cu_q.data_ptr() != static.cu_k.data_ptr()


@contextmanager
def known_as(name: str, backend: type[AttentionBackend]) -> Iterator[None]:
    """Within it, ``attention=name`` means ``backend``."""
    before = dict(attention._backends)
    attention._backends[name] = backend
    try:
        yield
    finally:
        attention._backends.clear()
        attention._backends.update(before)


# -- a body and its eager twin -----------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A compiled body, and the module as it was."""

    body: Any
    eager: nn.Module

    @property
    def module(self) -> nn.Module:
        module = unwrap(self.body)
        assert module is not None
        return module

    @property
    def graphs(self) -> list[CapturedGraph]:
        return [g for g in compiled_for(self.module) if isinstance(g, CapturedGraph)]

    @property
    def graph(self) -> CapturedGraph:
        (graph,) = self.graphs
        return graph

    @property
    def attention(self) -> Any:
        return self.graph.runner.program.attention

    @property
    def report(self) -> fgc.Report:
        return fgc.report(self.body)

    def dress(self, poison: Poison | None) -> None:
        for graph in self.graphs:
            graph.runner.poison = poison

    def same(self, lengths: Sequence[int], *, seed: int = 0, bucket: int | None = None, **more: Any) -> Tensor:
        """Call with a packed batch, compare with each request alone, and see that exactly this bucket was replayed.

        Args:
            bucket: what must replay; None = nothing may.
            more: further arguments of the call.
        """
        ids = tokens(sum(lengths), seed=seed)
        before = self.report.replays
        got = packed(self.body, ids, lengths, **more)
        equal(got, per_request(self.eager, ids, lengths, **more))
        assert self.report.replays - before == ({} if bucket is None else {bucket: 1})
        return got


def pair(module: nn.Module, *, first: Sequence[int] = (5,), **options: Any) -> Pair:
    """Compile ``module`` by ``fgc.compile``; its first call is made with ``first``, compared and uncounted."""
    eager = copy.deepcopy(module.eval())
    fgc.compile(module, **{"attention": "watched", **TAPE, **options})
    made = Pair(module, eager)
    ids = tokens(sum(first))
    equal(packed(module, ids, first), per_request(eager, ids, first))
    (report,) = {id(c.report): c.report for c in compiled_for(module)}.values()
    report.replays, report.padding, report.fallbacks = Counter(), Counter(), Counter()
    return made


def either_way(module: nn.Module, way: str, **options: Any) -> Pair:
    """The module compiled by ``fgc.compile``, or by plain ``torch.compile``; not called yet."""
    module.eval()
    eager = copy.deepcopy(module)
    if way == "fgc.compile":
        return Pair(fgc.compile(module, **options, **TAPE), eager)
    return Pair(torch.compile(module, backend="full_prefill", options={**options, **TAPE}), eager)


def packed(body: Any, ids: Tensor, lengths: Sequence[int], **more: Any) -> Tensor:
    """``[T, ...]`` rows of one packed call."""
    batch = fgc.PrefillBatch(list(lengths), device="cpu")
    positions = torch.cat([torch.arange(n) for n in lengths])[: len(ids)]
    positions = torch.nn.functional.pad(positions, (0, len(ids) - len(positions)))
    with torch.inference_mode(), batch:
        return _rows(body(input_ids=ids[None], position_ids=positions[None], **_flags(unwrap(body)), **more))


def per_request(model: nn.Module, ids: Tensor, lengths: Sequence[int], **more: Any) -> Tensor:
    """Each request alone through the module as it was: the meaning of a packed batch."""
    rows, start = [], 0
    with torch.inference_mode():
        for n in lengths:
            if n or not sum(lengths):
                positions = torch.arange(n)[None]
                rows.append(_rows(model(input_ids=ids[None, start : start + n], position_ids=positions,
                                        **_flags(model), **more)))  # fmt: skip
            start += n
    return torch.cat(rows)


def one_call(body: Any, n: int, *, seed: int = 0, **more: Any) -> Any:
    """The whole result of a call with ``n`` tokens of one request and no batch."""
    with torch.inference_mode():
        return body(input_ids=tokens(n, seed=seed)[None], position_ids=torch.arange(n)[None], **more)


def equal(got: Any, want: Any) -> None:
    """1e-5, relative and absolute; no NaN."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def only(report: fgc.Report, reason: Reason, times: int) -> None:
    """No graph was replayed, and each call said why."""
    assert not report.replays
    assert report.fallbacks == {reason: times}


def _rows(out: Any) -> Tensor:
    return (out if isinstance(out, Tensor) else out[0])[0]


def _flags(model: Any) -> dict[str, Any]:
    return {} if isinstance(model, T2) else {"use_cache": False}


# -- ops of which the package knows nothing, and a body with a memory --------------------------------------------------

_seen: dict[str, list[Tensor]] = {"all_reduce": [], "head": [], "reduce_scatter": []}


@contextmanager
def seen_by(op: str) -> Iterator[list[Tensor]]:
    """What an op of ``fgc_reports`` got, call by call, within."""
    _seen[op].clear()
    yield _seen[op]


def _recorded(op: str, x: Tensor) -> Tensor:
    _seen[op].append(x.detach().clone())
    return x.clone()


@torch.library.custom_op("fgc_reports::all_reduce", mutates_args=())
def _all_reduce(x: Tensor) -> Tensor:
    return _recorded("all_reduce", x)


@torch.library.custom_op("fgc_reports::head", mutates_args=())
def _head(x: Tensor) -> Tensor:
    return _recorded("head", x)


@torch.library.custom_op("fgc_reports::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor) -> Tensor:
    assert x.shape[1] % 4 == 0, f"{x.shape[1]} rows cannot be scattered over 4 ranks"
    return _recorded("reduce_scatter", x)


for _op in (_all_reduce, _head, _reduce_scatter):
    _op.register_fake(torch.empty_like)


class Recurrent(T2):
    """Between its layers each row adds itself to the state of its slot, and reads that state.

    Args of the call:
        slots: ``[T]`` int64, the slot of each row's request.
        fresh: ``[T]`` float, 1 in the rows of a request that starts with an empty state.
    """

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.full((4, 32), 7.0))

    def forward(self, input_ids: Tensor, position_ids: Tensor, slots: Tensor, fresh: Tensor) -> Tensor:
        x = self.layers[0](self.embed(input_ids) + self.place(position_ids))
        self.state[slots] = self.state[slots] * (1 - fresh)[:, None]
        self.state.index_add_(0, slots, x[0] * 0.1)
        return self.norm(self.layers[1](x + self.state[slots]))
