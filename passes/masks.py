"""Recognise an attention mask by what it computes.

The part of the graph that feeds the mask is run on made-up positions of several sizes and layouts, and its value is
compared with the masks that the attention op can express.  How the model writes its mask is of no interest, and a mask
that differs from every known kind at one place of one probe is not recognised.

Two limits: a mask that is a known one up to ``MOST_TOKENS`` tokens in one call, and another beyond, is taken for the
known one; and a value of ``HIDDEN`` or less that is added to a score hides the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from fullgraph_compile.passes.common import expression, token_dims, value_of
from fullgraph_compile.passes.part import NotUnderstood, Part
from fullgraph_compile.passes.probe import Probe, concrete, on_cpu

# Added to a score it leaves a weight of exactly zero (exp underflows in every dtype); -1e4 in bfloat16 is -9984.
HIDDEN = -9e3
MOST_TOKENS = 2**20
_SIZES = (1, 2, 3, 7, 33, 70)
_UNMATCHED = "the mask is none of causal, causal window, two-sided, two-sided window: "
# Where some rows alone can be computed, and where they cannot and T x T is computed in full.
_LARGE, _LARGE_IN_FULL, _MOST_IN_FULL = 2**16 + 7, 1031, 6000


@dataclass(frozen=True)
class MaskKind:
    """A mask that the attention op can express.

    Attributes:
        left, right: how many keys a query sees on each side of itself, as the op takes them; -1 = all.
        requests: "one": all tokens are one request. "positions": a request starts at each restart of the positions,
            that is at each token whose position is not the last token's plus one.
        positions: name of the placeholder that holds the positions, if ``requests`` is "positions".
    """

    left: int
    right: int
    requests: str
    positions: str | None


def recognise_mask(mask: Node, part: Part, token: Any, hides: bool = False, factor: float = 1.0) -> MaskKind:
    """What ``mask`` computes: ``[..., T, T]`` or broadcast to it, bool (True = seen, or hidden if it ``hides``) or
    float (added to the scores, and then multiplied by ``factor``).

    Runs on the CPU whatever device the graph names, deterministically, and without a trace in the caller's modes or
    random state.

    Raises:
        NotUnderstood: it is none of the known kinds, or cannot be run; the text says which.
    """
    value = value_of(mask)
    if not isinstance(value, Tensor) or value.dim() < 2 or not (value.dtype == torch.bool or value.is_floating_point()):
        raise NotUnderstood("it is not a bool or float tensor of two dims or more")
    for node in part.inputs:
        if len(token_dims(value_of(node), token)) > 1:
            raise NotUnderstood(f"it is built from {node.name}, an input that is itself as large as a mask")
    if any(expression(s) not in (1, token) for s in value.shape[-2:]):
        raise NotUnderstood(f"its last two sizes {tuple(value.shape[-2:])} are not the token count")
    with on_cpu():
        try:
            return _Recognition(mask, part, token, hides, factor).kind()
        except NotUnderstood:
            raise
        except Exception as error:
            # The part ran for the tracer but not here: nothing is known about it, so it must not be marked.
            raise NotUnderstood(f"it cannot be run on made-up positions ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class _Case:
    """Made-up inputs: the rows that are looked at, and the request of each token if positions decide."""

    tokens: int
    rows: Tensor
    inputs: dict[Node, Tensor]
    requests: Tensor
    sampled: bool = False


class _Recognition:
    def __init__(self, mask: Node, part: Part, token: Any, hides: bool, factor: float) -> None:
        self.mask, self.part, self.token, self.hides, self.factor = mask, part, token, hides, factor
        self.random = torch.Generator().manual_seed(0)
        # A graph of one fixed size can be run at that size only.
        self.fixed = int(token) if getattr(token, "is_Integer", False) else None
        self.candidates = [n for n in part.inputs if self._can_be_positions(n)]
        env = getattr(getattr(value_of(mask), "fake_mode", None), "shape_env", None)
        bounds = getattr(env, "var_to_range", {}).get(token) if env is not None else None
        self.least = int(bounds.lower) if bounds is not None and bounds.lower.is_number else 1

    def _can_be_positions(self, node: Node) -> bool:
        value = value_of(node)
        sizes = sorted((expression(s) for s in value.shape if expression(s) != 1), key=str)
        return value.dtype in (torch.int32, torch.int64) and sizes == [self.token]

    def kind(self) -> MaskKind:
        try:
            return self._kind()
        except NotUnderstood:
            for node in self.part.inputs:
                if self._pads(node):
                    way_out = f"a padding mask was given ({node.name}): pack the batch with fgc.compile"
                    raise NotUnderstood(way_out) from None
            raise

    def _kind(self) -> MaskKind:
        left, right = self._window()
        found: MaskKind | None = None
        ignored = True
        difference = ""
        candidates: list[Node | None] = [*self.candidates] or [None]
        for positions in candidates:
            holds = {"one": "", "positions": "" if positions is not None else "no positions"}
            for case in self._cases(positions):
                seen = self._seen(case)
                for requests, miss in holds.items():
                    if not miss:
                        same = case.requests if requests == "positions" else torch.zeros_like(case.requests)
                        holds[requests] = _difference(seen, case, same, left, right)
                if all(holds.values()):
                    break
            ignored = ignored and not holds["one"]
            difference = difference or holds["one"]
            if not holds["positions"] and holds["one"] and positions is not None:
                found = MaskKind(left, right, "positions", positions.name)
        if ignored:
            return MaskKind(left, right, "one", None)
        if found is not None:
            return found
        raise NotUnderstood(_UNMATCHED + difference)

    def _window(self) -> tuple[int, int]:
        """How far the first and the last query see, where all tokens are one request."""
        case = next(self._large(None))
        for node in self.candidates:
            case.inputs[node] = torch.arange(case.tokens).reshape(case.inputs[node].shape)
        seen = self._seen(case).reshape(-1, len(case.rows), case.tokens)[0]
        first, last = seen[0].nonzero().flatten(), seen[-1].nonzero().flatten()
        if not len(first) or not len(last):
            raise NotUnderstood(_UNMATCHED + "a query sees nothing")
        left, right = case.tokens - 1 - int(last[0]), int(first[-1])
        left, right = (-1 if n == case.tokens - 1 else n for n in (left, right))
        if right != 0 and (left < 0) != (right < 0):
            raise NotUnderstood(f"{_UNMATCHED}a query sees {left} keys to its left and {right} to its right (-1 = all)")
        return left, right

    def _cases(self, positions: Node | None) -> Iterator[_Case]:
        for tokens in _SIZES if self.fixed is None else (self.fixed,):
            if tokens >= self.least:
                for layout in self._layouts(tokens) if positions is not None else [torch.arange(tokens)]:
                    for filling in range(4 if len(self.part.inputs) > (positions is not None) else 1):
                        inputs = self._inputs(positions, layout, filling)
                        yield _Case(tokens, torch.arange(tokens), inputs, _requests(layout))
        yield from self._large(positions)

    def _layouts(self, tokens: int) -> list[Tensor]:
        """Positions of one request from 0 and from elsewhere, of packed requests, and of no order that makes sense."""
        run = torch.arange(tokens)
        starts = torch.randint(0, tokens, (4,), generator=self.random)
        packed = run - (run[:, None] >= starts).mul(starts).amax(1)
        resumed = torch.where(run >= starts[0], run - starts[0] + 5, run + 11)
        steps = torch.randint(0, 3, (tokens,), generator=self.random)
        return [run, run + 17, packed, resumed, steps.cumsum(0), torch.zeros_like(run), run.flip(0),
                torch.randint(0, 2 * tokens, (tokens,), generator=self.random)]  # fmt: skip

    def _large(self, positions: Node | None) -> Iterator[_Case]:
        """Sizes beyond every constant of the part, so that every window shows: one request, then packed ones."""
        if self.fixed is not None:
            run = torch.arange(self.fixed)
            yield _Case(self.fixed, run, self._inputs(positions, run, 3), run * 0)
            return
        constants = self._constants()
        for sampled in (True, False):
            most = max(constants, default=0) + 33
            if not sampled and most > _MOST_IN_FULL:
                raise NotUnderstood(f"{self.why_in_full}, which is too much for a constant of {max(constants)}")
            tokens = max(most, _LARGE if sampled else _LARGE_IN_FULL)
            run = torch.arange(tokens)
            rows = self._sample(tokens, constants) if sampled else run
            short = torch.where(run >= tokens - 40, run - (tokens - 40), run)
            gap = torch.where(short >= tokens // 2 + 3, short + 1, short)
            layouts = [run] if positions is None else [run, short, gap]
            cases = [_Case(tokens, rows, self._inputs(positions, p, 3), _requests(p), sampled) for p in layouts]
            if sampled and not self._rows_can_be_had(cases[0]):
                continue
            yield from cases
            return

    def _rows_can_be_had(self, case: _Case) -> bool:
        try:
            Probe(self.part, self.token, case.tokens, case.inputs).run_rows(self.mask, case.rows[:1])
        except Exception as reason:
            # Whatever stood in the way: computing all rows decides.
            self.why_in_full = str(reason)
            return False
        return True

    def _sample(self, tokens: int, constants: list[int]) -> Tensor:
        near = [c + d for c in constants[-6:] for d in (-1, 0, 1)]
        last, middle = tokens - 1, tokens // 2
        rows = [0, 1, 2, middle, middle + 3, last - 40, last - 39, last - 38, last - 1, last, *near]
        rows += torch.randint(0, tokens, (6,), generator=self.random).tolist()
        return torch.tensor(sorted({r for r in rows if 0 <= r < tokens}))

    def _constants(self) -> list[int]:
        """Numbers in the part that may be a distance between tokens."""
        found: set[int] = set()

        def note(value: Any) -> Any:
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 < abs(value) <= MOST_TOKENS:
                found.add(int(abs(value)))
            return value

        for node in self.part.nodes:
            map_aggregate((node.args, dict(node.kwargs)), note)
        return sorted(found)

    def _inputs(self, positions: Node | None, layout: Tensor, filling: int) -> dict[Node, Tensor]:
        """Tensors for all inputs: the layout for the positions; for others zeros, ones, random 0 and 1, or random."""
        inputs: dict[Node, Tensor] = {}
        for node in self.part.inputs:
            value = value_of(node)
            shape = [concrete(s, self.token, len(layout)) for s in value.shape]
            if node == positions:
                inputs[node] = layout.reshape(shape).to(value.dtype)
            else:
                low, high = ((0, 1), (1, 2), (0, 2), (0, 100))[filling]
                high = min(high, 2) if value.dtype == torch.bool else high
                inputs[node] = torch.randint(low, high, shape, generator=self.random).to(value.dtype)
        return inputs

    def _seen(self, case: _Case) -> Tensor:
        probe = Probe(self.part, self.token, case.tokens, dict(case.inputs))
        value = probe.run_rows(self.mask, case.rows) if case.sampled else probe.run(self.mask)
        if value.dtype != torch.bool:
            value = value * self.factor
            if not bool(((value == 0) | (value <= HIDDEN)).all()):
                raise NotUnderstood("it adds a bias to the scores: its values are not 0 or very negative alone")
            value = value == 0
        elif self.hides:
            value = ~value
        return value.expand(*value.shape[:-2], len(case.rows), case.tokens)

    def _pads(self, node: Node) -> bool:
        """Whether the node's zeros hide keys, and do nothing else."""
        if value_of(node).dim() != 2 or len(token_dims(value_of(node), self.token)) != 1:
            return False
        tokens = 33
        others = [n for n in self.candidates if n is not node]
        inputs = self._inputs(others[0] if others else None, torch.arange(tokens), 1)

        def seen() -> Tensor:
            return self._seen(_Case(tokens, torch.arange(tokens), inputs, torch.arange(tokens)))

        try:
            whole, hides = seen(), False
            for _ in range(4):
                kept = torch.randint(0, 2, (tokens,), generator=self.random)
                kept[0] = 1
                inputs[node] = kept.reshape(inputs[node].shape).to(inputs[node].dtype)
                if not torch.equal(seen(), whole & kept.bool()):
                    return False
                hides = hides or not torch.equal(seen(), whole)
        except NotUnderstood:
            return False
        return hides


def _requests(positions: Tensor) -> Tensor:
    """The request of each token: a new one where a position is not the last one plus one."""
    return torch.cat([positions.new_zeros(1), (positions.diff() != 1).cumsum(0)])


def _difference(seen: Tensor, case: _Case, requests: Tensor, left: int, right: int) -> str:
    """Where ``seen`` is not the mask of these requests and this window; empty if nowhere."""
    query, key = case.rows[:, None], torch.arange(case.tokens)
    expected = requests[case.rows][:, None] == requests
    if left >= 0:
        expected &= key >= query - left
    if right >= 0:
        expected &= key <= query + right
    wrong = seen != expected
    if not bool(wrong.any()):
        return ""
    *_, row, column = wrong.nonzero()[0].tolist()
    verb = "does not see" if expected[row, column] else "sees"
    return f"of {case.tokens} tokens, query {int(case.rows[row])} {verb} key {column}"
