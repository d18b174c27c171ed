"""A progress bar by phase, on stderr, when a person looks on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def steps(items: Iterable[T], phase: str, *, show: bool, total: int | None = None) -> Iterator[T]:
    """Iterate, showing ``phase`` and how far it is."""
    yield from tqdm(items, desc=f"full_prefill: {phase}", total=total, disable=not show, leave=False, file=sys.stderr)


@contextmanager
def phase(name: str, *, show: bool) -> Iterator[None]:
    """Show ``name`` while something is done that has no steps to count."""
    with tqdm(desc=f"full_prefill: {name}", total=1, disable=not show, leave=False, file=sys.stderr):
        yield
