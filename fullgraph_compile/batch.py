"""The batch: what the user says of it (``PrefillBatch``), and what a graph reads of it (``StaticBatch``)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fullgraph_compile.host_values import counted, counting, ranges, to_device

if TYPE_CHECKING:
    from fullgraph_compile.cache import PagedKVCache


class PrefillBatch:
    """The requests of one packed call, on the host.  Enter it around the calls that it describes.

    All requests' new tokens lie in one row, ``[1, T]`` or ``[T]``, in the order of ``new_tokens``.

    Args:
        new_tokens: query length of each request; 0 is allowed.
        cached_tokens: prefix of each request that is in the KV cache already; None = 0 for all.
        cache: the KV cache that the calls read and write; None = attention sees the new tokens only.
        pages: page ids of each request, in the order of its tokens, with room for its cached and new tokens; given
            with ``cache``.  No page is written by two requests; pages of a prefix may be shared.
        device: where ``position_ids`` and ``last_token_rows`` are made; None = that of the cache; without one torch's
            default device if it is not the CPU, else a GPU if there is one, else the CPU.

    Raises:
        TypeError: a length or a page is not an integer; ``cache`` is something else.
        ValueError: a length is negative, there is no request, a prefix is given without a KV cache, or the pages are
            not ones that the cache can serve.

    Example:
        >>> batch = PrefillBatch(new_tokens=[30, 7, 112])
        >>> with torch.inference_mode(), batch:
        ...     hidden = body(input_ids=ids[None], use_cache=False)[0]
        ...     logits = model.lm_head(hidden[0, batch.last_token_rows])
    """

    cache: PagedKVCache | None
    pages: list[list[int]] | None

    def __init__(
        self,
        new_tokens: Sequence[int],
        cached_tokens: Sequence[int] | None = None,
        *,
        cache: PagedKVCache | None = None,
        pages: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        new = _lengths("new_tokens", new_tokens)
        cached = [0] * len(new) if cached_tokens is None else _lengths("cached_tokens", cached_tokens)
        if not new:
            raise ValueError("new_tokens=[] holds no request; give the new tokens of at least one")
        if len(cached) != len(new):
            raise ValueError(
                f"cached_tokens has {len(cached)} entries, new_tokens has {len(new)}; give one for each request"
            )
        if cache is None and any(cached):
            raise ValueError(
                f"cached_tokens={cached} names a prefix, but this batch has no KV cache to read it from; "
                "give cache= and pages=, or 0 for each request"
            )
        if (cache is None) != (pages is None):
            given, missing = ("pages", "cache") if cache is None else ("cache", "pages")
            raise ValueError(f"{given} is given without {missing}; give both, or neither")
        if cache is not None and not hasattr(cache, "check_pages"):
            raise TypeError(f"cache is a {type(cache).__name__}, not a PagedKVCache")
        if device is None:
            device = _default_device() if cache is None else cache.device
        self._set(new, cached, torch.device(device))
        if cache is not None:
            assert pages is not None
            self.cache = cache
            self.pages = [_integers(f"pages[{i}]", held) for i, held in enumerate(pages)]
            cache.check_pages(self.pages, self.lengths, cached)
            if not same_device(self.device, cache.device):
                raise ValueError(f"device={str(device)!r} is not that of the cache, which is on {cache.device}")

    def _set(self, new: list[int], cached: list[int], device: torch.device) -> None:
        self.new_tokens = new
        self.cached_tokens = cached
        self.lengths = [n + c for n, c in zip(new, cached, strict=True)] if any(cached) else list(new)
        self.tokens = sum(new)
        self.requests = len(new)
        self.longest = max(self.lengths)
        self.device = device
        self.cache = None
        self.pages = None

    @classmethod
    def of_checked(cls, new_tokens: list[int], device: torch.device) -> PrefillBatch:
        """Requests without a prefix, of which all that the constructor checks is known."""
        batch = cls.__new__(cls)
        batch._set(new_tokens, [0] * len(new_tokens), device)
        return batch

    @classmethod
    def for_capture(cls, lengths: list[int], cache: PagedKVCache | None, device: torch.device) -> PrefillBatch:
        """The batch that a graph is captured with: legal, and over no request's pages: it reads page 0 and writes
        nowhere."""
        batch = cls(lengths, device=device)
        batch.cache = cache
        return batch

    def request(self, i: int) -> PrefillBatch:
        """Request ``i`` in a batch of its own."""
        pages = None if self.pages is None else [self.pages[i]]
        return PrefillBatch(
            [self.new_tokens[i]], [self.cached_tokens[i]], cache=self.cache, pages=pages, device=self.device
        )

    @cached_property
    def position_ids(self) -> Tensor:
        """Position of each row within its request, cached tokens counted: ``[T]`` int64 on ``device``."""
        return ranges(self.cached_tokens, self.lengths, self.device)

    @cached_property
    def row_of_positions(self) -> Tensor:
        """The positions as a packed call takes them: ``[1, T]``; nothing may write to it."""
        if self.requests == 1 and not self.cached_tokens[0]:
            return counting(self.tokens, self.device)
        return ranges(self.cached_tokens, self.lengths, self.device)[None]

    @cached_property
    def host_positions(self) -> np.ndarray:
        """``position_ids`` on the host."""
        return counted(self.cached_tokens, self.lengths)

    @cached_property
    def words(self) -> tuple[bytes, bytes, bytes, bytes]:
        """As int32: new tokens of each request, where each one's begin and where the last one's end, and the same of
        cached and new tokens."""
        new, starts = _words(self.new_tokens)
        return (new, starts, *((new, starts) if self.lengths == self.new_tokens else _words(self.lengths)))

    @cached_property
    def last_token_rows(self) -> Tensor:
        """Row of the last new token of each request that has any: int64 on ``device``."""
        new = np.array(self.new_tokens)
        return to_device((np.cumsum(new) - 1)[new > 0], self.device)

    def __enter__(self) -> PrefillBatch:
        active = _active.get()
        if active is not None:
            raise RuntimeError(
                f"{self!r} was entered inside {active!r}; batches do not nest: leave the first before the second"
            )
        _active.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        # Nothing is kept in the batch: threads may be inside of one batch at once.
        if _active.get() is self:
            _active.set(None)

    def __repr__(self) -> str:
        some = ", ".join(map(str, self.new_tokens[:8])) + (", ..." if self.requests > 8 else "")
        after = f" after {sum(self.cached_tokens)} cached" if any(self.cached_tokens) else ""
        return f"PrefillBatch({self.requests} requests, {self.tokens} tokens{after}: {some})"


_active: ContextVar[PrefillBatch | None] = ContextVar("fullgraph_compile_batch", default=None)


def active_batch() -> PrefillBatch | None:
    """The batch that the caller is inside of, or None."""
    return _active.get()


@contextmanager
def no_active_batch() -> Iterator[None]:
    """Leave the caller's batch for calls of our own."""
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


@dataclass(frozen=True)
class StaticBatch:
    """The device side of a batch: what attention reads.

    A captured graph keeps the addresses of these tensors, so they are never rebound; all of them are rewritten in
    full before each replay.  Slots past the live requests are sentinels: no new tokens, no cached tokens, offsets
    equal to the real total.

    Attributes:
        tokens: rows of the call: the bucket, or the exact count where no graph is used.
        slots: request slots R.
        max_q: bound of ``q_lens``, known at capture; never 1, as some kernels take another path for decoding then.
        max_k: bound of ``k_lens``, known at capture.
        cu_q: ``[R + 1]`` int32, where each request's queries start; tail = real total.
        cu_k: ``[R + 1]`` int32, where each request's keys start; tail = real total of keys.
        q_lens: ``[R]`` int32; tail 0.
        k_lens: ``[R]`` int32; tail 0.
        pad_cu_q: ``[R + 2]`` int32: ``cu_q``, then ``tokens``: one more request that holds the padded rows ...
        pad_cu_k: ``[R + 2]`` int32: ``cu_k``, then its last entry again: ... and that has no keys.
        num_real_tokens: ``[1]`` int32, the real total.
        cache: the KV cache that keys are read from; None = keys are arguments, laid out by ``cu_k``.
        page_table: ``[R, P]`` int32, pages of each request; unused cells hold reserved page 0.  None without a cache.
        slot_ids: ``[tokens]`` int64, where each row's K and V are written: page * page_size + offset in the page;
            padded rows 0, which is in reserved page 0.  -1 is written nowhere.  None without a cache.
        table_rows: ``[R]`` integers, the row of ``page_table`` that each request has, where the table is an engine's
            own, with a row for each request that it knows; read for live requests only.  None = request i has row i.
    """

    tokens: int
    slots: int
    max_q: int
    max_k: int
    cu_q: Tensor
    cu_k: Tensor
    q_lens: Tensor
    k_lens: Tensor
    pad_cu_q: Tensor
    pad_cu_k: Tensor
    num_real_tokens: Tensor
    cache: PagedKVCache | None = None
    page_table: Tensor | None = None
    slot_ids: Tensor | None = None
    table_rows: Tensor | None = None


def _words(lengths: list[int]) -> tuple[bytes, bytes]:
    return array("i", lengths).tobytes(), array("i", accumulate(lengths, initial=0)).tobytes()


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are one: without an index, CUDA's is taken for the first."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _lengths(name: str, values: Any) -> list[int]:
    numbers = _integers(name, values)
    if numbers and min(numbers) < 0:
        raise ValueError(f"{name} holds {min(numbers)}; token counts are 0 or more")
    return numbers


def _integers(name: str, values: Any) -> list[int]:
    if isinstance(values, (Tensor, np.ndarray)):
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name}={values!r} must be a list of integers")
    if not set(map(type, values)) <= {int}:
        for n in values:
            if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
                raise TypeError(f"{name} holds {n!r}, which is not an integer")
    return list(map(int, values))


def _default_device() -> torch.device:
    default = torch.get_default_device()
    if default.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return default
