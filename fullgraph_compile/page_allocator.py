"""Who holds which page of a paged KV cache: host code on integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Page ids are staged as int32.
_MAX_PAGES = 2**31 - 1


class OutOfPages(RuntimeError):
    """The cache has fewer free pages than were asked for.  Nothing was handed out: free some and ask again."""


class PageAllocator:
    """Hands out pages by number, 1 ... pages - 1.

    Page 0 is reserved: it stands in unused cells of the page table and takes what padded tokens write.  The allocator
    never touches the device, and hands pages out without clearing them.  It is not thread-safe.

    Args:
        pages: page count, the reserved one included; 2 or more.
        page_size: tokens in a page, 1 or more.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is out of range.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = as_integer("pages", pages)
        self.page_size = as_integer("page_size", page_size)
        if self.page_size < 1:
            raise ValueError(f"page_size={page_size} must be 1 or more")
        if not 2 <= self.pages <= _MAX_PAGES:
            raise ValueError(
                f"pages={pages} must be 2 ... {_MAX_PAGES}: page 0 is reserved for padded tokens, and requests need one"
            )
        self._free = list(range(self.pages - 1, 0, -1))  # a stack, lowest page on top
        self._holders: dict[int, int] = {}  # page -> how many lists hold it; only pages in use
        self._allocates = False

    @property
    def capacity(self) -> int:
        """Tokens that all pages but the reserved one hold."""
        return (self.pages - 1) * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, tokens: int) -> list[int]:
        """Pages for a request of ``tokens`` tokens; they hold whatever was written to them before.

        Raises:
            OutOfPages: too few pages are free.
            ValueError: ``tokens`` is negative.
        """
        return self._take(self._pages_for("tokens", tokens))

    def append(self, pages: list[int], tokens_before: int, new: int) -> list[int]:
        """Grow a request's list, in place, until it has room for ``new`` tokens after the first ``tokens_before``.

        Returns:
            ``pages``, the same list.

        Raises:
            OutOfPages: too few pages are free; the list is as it was.
            ValueError: a page is not in use, ``tokens_before`` is more than the pages hold, or the new tokens would
                be written to a page that another list holds too.
        """
        self._check_held("pages", pages)
        self._pages_for("new", new)
        if self._pages_for("tokens_before", tokens_before) > len(pages):
            raise ValueError(
                f"tokens_before={tokens_before} does not fit in {_counted(len(pages))} of {self.page_size} tokens; "
                f"valid are 0 ... {len(pages) * self.page_size}"
            )
        if new:
            for page in pages[tokens_before // self.page_size :]:
                if self._holders[page] > 1:
                    raise ValueError(
                        f"token {tokens_before} and those after it would be written to page {page}, which "
                        f"{self._holders[page]} lists share; append after the shared pages"
                    )
        pages += self._take(max(0, self._pages_for("tokens", tokens_before + new) - len(pages)))
        return pages

    def share(self, pages: list[int], tokens: int) -> list[int]:
        """A second list on the pages of a prefix, for another request to begin with.

        Only whole pages are shared: the list holds the first ``tokens // page_size`` pages, so the other request has
        ``len(list) * page_size`` cached tokens.  A page is free when every list that holds it was freed.

        Raises:
            ValueError: a page is not in use, or ``tokens`` is negative or more than the pages hold.
        """
        self._check_held("pages", pages)
        if self._pages_for("tokens", tokens) > len(pages):
            raise ValueError(
                f"tokens={tokens} is more than {_counted(len(pages))} of {self.page_size} tokens hold; "
                f"valid are 0 ... {len(pages) * self.page_size}"
            )
        shared = pages[: tokens // self.page_size]
        for page in shared:
            self._holders[page] += 1
        return shared

    def free(self, pages: list[int]) -> None:
        """Give a request's pages back; a shared one stays in use until its other lists are freed.

        Raises:
            TypeError: ``pages`` is no list, or a page is not an integer.
            ValueError: a page is not in use (freed before, or never handed out), not a page, or listed twice; then
                no page is freed.
        """
        self._check_held("pages", pages)
        for page in reversed(pages):
            if self._holders[page] > 1:
                self._holders[page] -= 1
            else:
                del self._holders[page]
                self._free.append(page)

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPages(
                f"{_counted(count)} of {self.page_size} tokens {'is' if count == 1 else 'are'} needed, but "
                f"{len(self._free)} of {self.pages - 1} are free"
            )
        self._allocates = True
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update((page, 1) for page in taken)
        return taken

    def _pages_for(self, name: str, tokens: int) -> int:
        if as_integer(name, tokens) < 0:
            raise ValueError(f"{name}={tokens} must be 0 or more")
        return -(-tokens // self.page_size)

    # -- checks --------------------------------------------------------------------------------------------------

    def check_pages(
        self, pages: Sequence[Sequence[int]], lengths: Sequence[int], cached: Sequence[int] | None = None
    ) -> None:
        """Refuse pages that a kernel must not see.

        From the first ``allocate`` on, a page must also have been handed out by it: one that was freed, or that
        belongs to another cache, is refused.

        Args:
            pages: page ids of each request.
            lengths: tokens of each request, cached and new.
            cached: tokens of each request that are there already and are not written again; None = nothing is written.

        Raises:
            TypeError: a page (unless it equals one in use) or a length is not an integer.
            ValueError: a page is out of range, not in use or listed twice, a request has too few pages, or a page
                would be written that another request writes or another list holds.
        """
        if len(pages) != len(lengths):
            raise ValueError(f"pages has {len(pages)} lists for {len(lengths)} requests; give one for each request")
        for i, (held, length) in enumerate(zip(pages, lengths, strict=True)):
            # Once a batch, with thousands of pages if they are small: what is right costs no loop in Python.
            once = set(held)
            if len(once) != len(held) or not self._holders.keys() >= once:
                check = self._check_held if self._allocates else self._check_range
                check(f"pages[{i}]", held)
            needed = self._pages_for(f"lengths[{i}]", length)
            if needed > len(held):
                raise ValueError(
                    f"pages[{i}] has {_counted(len(held))} of {self.page_size} tokens; a request of {length} tokens "
                    f"needs {needed}"
                )
        if cached is not None:
            self._check_written(pages, lengths, cached)

    def _check_written(self, pages: Sequence[Sequence[int]], lengths: Sequence[int], cached: Sequence[int]) -> None:
        writers: dict[int, int] = {}
        for i, (held, length, start) in enumerate(zip(pages, lengths, cached, strict=True)):
            for page in held[start // self.page_size : -(-length // self.page_size)] if length > start else ():
                if page in writers:
                    raise ValueError(f"pages[{writers[page]}] and pages[{i}] would both write page {page}")
                if self._holders.get(page, 1) > 1:
                    raise ValueError(
                        f"pages[{i}] would write token {start} and those after it to page {page}, which "
                        f"{self._holders[page]} lists share; only cached tokens may lie in shared pages"
                    )
                writers[page] = i

    def _check_held(self, name: str, pages: Sequence[int]) -> None:
        self._check_range(name, pages)
        for page in pages:
            if page not in self._holders:
                raise ValueError(
                    f"{name} holds page {page}, which is not in use: it was freed before, or this cache never handed "
                    "it out"
                )

    def _check_range(self, name: str, pages: Sequence[int]) -> None:
        if isinstance(pages, (str, bytes)) or not hasattr(pages, "__len__"):
            raise TypeError(f"{name}={pages!r} must be a list of page ids")
        if not set(map(type, pages)) <= {int}:
            for page in pages:
                as_integer(f"{name}: page", page)
        if len(pages) and not (min(pages) > 0 and max(pages) < self.pages):
            wrong = next(page for page in pages if not 0 < page < self.pages)
            reserved = " (page 0 is reserved for padded tokens)" if wrong == 0 else ""
            raise ValueError(f"{name} holds page {wrong}; valid are 1 ... {self.pages - 1}{reserved}")
        if len(set(pages)) != len(pages):
            twice = next(page for i, page in enumerate(pages) if page in pages[:i])
            raise ValueError(f"{name} holds page {twice} twice")


def as_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}, which is not an integer")
    return int(value)


def _counted(pages: int) -> str:
    return f"{pages} page{'s' * (pages != 1)}"
