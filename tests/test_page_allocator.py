"""The page allocator: who holds which page, and what it refuses before a kernel sees it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullgraph_compile.page_allocator import OutOfPages
from tests.caches import cache_of


def test_pages_are_handed_out_for_tokens_rounded_up() -> None:
    cache = cache_of(8, 4)
    assert [len(cache.allocate(n)) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert cache.free_pages == 3
    with pytest.raises(OutOfPages, match="4 pages of 4 tokens are needed, but 3 of 7 are free"):
        cache.allocate(13)
    assert cache.free_pages == 3
    with pytest.raises(ValueError, match="tokens=-1 must be 0 or more"):
        cache.allocate(-1)
    with pytest.raises(TypeError, match=r"tokens is 1\.5, which is not an integer"):
        cache.allocate(1.5)


def test_b15_page_0_is_never_handed_out() -> None:
    cache = cache_of(8, 1)
    first = cache.allocate(1)
    assert sorted(first + cache.allocate(6)) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(OutOfPages, match="1 page of 1 tokens is needed, but 0 of 7 are free"):
        cache.allocate(1)


def test_append_grows_the_list_in_place_and_only_when_it_must() -> None:
    cache = cache_of(8, 4)
    pages = cache.allocate(6)
    before = list(pages)
    assert cache.append(pages, 6, 2) is pages and pages == before
    assert cache.append(pages, 8, 1) is pages and pages[:2] == before and len(pages) == 3
    cache.append(pages, 9, 0)
    assert len(pages) == 3
    with pytest.raises(OutOfPages):
        cache.append(pages, 12, 17)
    assert len(pages) == 3 and cache.free_pages == 4
    with pytest.raises(
        ValueError, match=r"tokens_before=13 does not fit in 3 pages of 4 tokens; valid are 0 \.\.\. 12"
    ):
        cache.append(pages, 13, 1)
    grown: list[int] = []
    assert cache.append(grown, 0, 5) is grown and len(grown) == 2


def test_a_shared_prefix_is_whole_pages_and_stays_until_its_last_list_is_freed() -> None:
    cache = cache_of(8, 4)
    pages = cache.allocate(10)
    shared = cache.share(pages, 10)
    assert shared == pages[:2] and shared is not pages and cache.free_pages == 4
    assert cache.share(pages, 3) == []
    cache.append(shared, 8, 1)
    cache.free(pages)
    assert cache.free_pages == 4  # pages[2] came back, shared[2] went out
    assert not set(cache.allocate(16)) & set(shared)
    cache.free(shared)
    assert cache.free_pages == 3
    with pytest.raises(ValueError, match="holds page 1, which is not in use: it was freed before"):
        cache.free(shared)
    with pytest.raises(ValueError, match="which is not in use"):
        cache.share(shared, 4)


def test_share_of_more_than_the_pages_hold_is_refused() -> None:
    cache = cache_of(8, 4)
    pages = cache.allocate(6)
    assert cache.share(pages, 8) == pages
    with pytest.raises(ValueError, match=r"tokens=9 is more than 2 pages of 4 tokens hold; valid are 0 \.\.\. 8"):
        cache.share(pages, 9)


def test_new_tokens_never_go_to_a_page_that_another_list_reads() -> None:
    cache = cache_of(8, 4)
    pages = cache.allocate(8)
    shared = cache.share(pages, 8)
    with pytest.raises(ValueError, match=rf"token 5 .* would be written to page {pages[1]}, which 2 lists share"):
        cache.append(shared, 5, 1)
    cache.append(shared, 5, 0)
    cache.append(shared, 8, 1)
    cache.free(pages)
    cache.append(shared, 5, 1)


@pytest.mark.parametrize(
    "wrong, error, text",
    [
        ([0], ValueError, r"holds page 0; valid are 1 \.\.\. 7 \(page 0 is reserved for padded tokens\)"),
        ([8], ValueError, r"holds page 8; valid are 1 \.\.\. 7$"),
        ([-1], ValueError, r"holds page -1; valid are 1 \.\.\. 7$"),
        ([7], ValueError, r"holds page 7, which is not in use: .* never handed it out"),
        ([1, 2, 1], ValueError, r"holds page 1 twice"),
        ([1.0], TypeError, r"page is 1\.0, which is not an integer"),
        ([True], TypeError, r"page is True, which is not an integer"),
    ],
)
def test_a_foreign_page_is_an_error_and_changes_nothing(wrong: Any, error: type[Exception], text: str) -> None:
    cache = cache_of(8, 4)
    mine = cache.allocate(8)
    assert mine == [1, 2]
    if error is ValueError and text.startswith("holds page 1 "):
        calls: list[Any] = [cache.free]
    else:
        wrong = [*mine, *wrong] if wrong[0] != 1 else wrong
        calls = [cache.free, lambda w: cache.append(w, 0, 1), lambda w: cache.share(w, 1)]
    for call in calls:
        with pytest.raises(error, match=text):
            call(list(wrong))
    assert cache.free_pages == 5
    cache.free(mine)
    assert cache.free_pages == 7


def test_freeing_twice_is_an_error() -> None:
    cache = cache_of()
    pages = cache.allocate(9)
    cache.free(pages)
    with pytest.raises(ValueError, match=r"pages holds page 1, which is not in use: it was freed before"):
        cache.free(pages)
    assert cache.free_pages == 7


STEP = st.tuples(
    st.sampled_from(["allocate", "append", "share", "free", "twice"]), st.integers(0, 9), st.integers(0, 13)
)


@settings(max_examples=150, deadline=None)
@given(page_size=st.integers(1, 5), pages=st.integers(2, 12), steps=st.lists(STEP, max_size=40))
def test_any_run_of_the_allocator_keeps_each_page_with_its_holders(page_size: int, pages: int, steps: Any) -> None:
    """Against a model: lists of the requests that are alive, and how many tokens each has."""
    cache = cache_of(pages, page_size)
    alive: list[tuple[list[int], int]] = []
    freed: list[list[int]] = []
    for what, which, tokens in steps:
        chosen = alive[which % len(alive)] if alive else None
        room = cache.free_pages
        if what == "allocate":
            needed = -(-tokens // page_size)
            if needed > room:
                with pytest.raises(OutOfPages):
                    cache.allocate(tokens)
            else:
                alive.append((cache.allocate(tokens), tokens))
        elif chosen is None:
            continue
        elif what == "append":
            held, before = chosen
            needed = max(0, -(-(before + tokens) // page_size) - len(held))
            copy = list(held)
            if needed > room:
                with pytest.raises(OutOfPages):
                    cache.append(held, before, tokens)
                assert held == copy
            elif tokens and any(sum(p in h for h, _ in alive) > 1 for p in held[before // page_size :]):
                with pytest.raises(ValueError, match="share"):
                    cache.append(held, before, tokens)
                assert held == copy
            else:
                assert cache.append(held, before, tokens) is held
                assert held[: len(copy)] == copy and len(held) == len(copy) + needed
                alive[which % len(alive)] = (held, before + tokens)
        elif what == "share":
            held, count = chosen
            count = min(count, tokens)
            shared = cache.share(held, count)
            assert shared == held[: count // page_size]
            alive.append((shared, len(shared) * page_size))
        else:
            held, _ = alive.pop(which % len(alive))
            cache.free(held)
            freed.append(held)
            in_use = {p for h, _ in alive for p in h}
            if what == "twice" and set(held) - in_use:
                with pytest.raises(ValueError, match="not in use"):
                    cache.free(held)

        holders = Counter(p for held, _ in alive for p in held)
        assert all(0 < p < pages for p in holders)
        assert cache.free_pages == pages - 1 - len(holders)
        for held, count in alive:
            assert len(set(held)) == len(held) >= -(-count // page_size)
            cache.check_pages([held], [count])
    # Each page that is held by more than one list was shared, not handed out twice: what is left goes out once.
    rest = cache.allocate(cache.free_pages * page_size)
    assert sorted([*rest, *{p for held, _ in alive for p in held}]) == list(range(1, pages))
    for held, _ in alive:
        cache.free(held)
    assert cache.free_pages == pages - 1 - len(rest)


# -- what a batch is checked for ---------------------------------------------------------------------------------


def test_pages_and_lengths_that_fit_are_taken() -> None:
    cache = cache_of(8, 4)
    cache.check_pages([[1, 2], [], [7, 3, 5]], [8, 0, 9])
    cache.check_pages([], [])
    a, b = cache.allocate(5), cache.allocate(3)
    cache.check_pages([a, b, cache.share(a, 4)], [8, 0, 4])


@pytest.mark.parametrize("allocates", [False, True])
@pytest.mark.parametrize(
    "pages, lengths, error, text",
    [
        ([[1], [8]], [1, 1], ValueError, r"pages\[1\] holds page 8; valid are 1 \.\.\. 7$"),
        ([[1], [2, -1]], [1, 1], ValueError, r"pages\[1\] holds page -1; valid are 1 \.\.\. 7$"),
        ([[2**40]], [1], ValueError, r"holds page 1099511627776; valid"),
        ([[1, 0]], [1], ValueError, r"pages\[0\] holds page 0; valid are 1 \.\.\. 7 \(page 0 is reserved"),
        ([[1, 2, 1]], [1], ValueError, r"pages\[0\] holds page 1 twice"),
        ([[1, 2]], [9], ValueError, r"pages\[0\] has 2 pages of 4 tokens; a request of 9 tokens needs 3"),
        ([[1], []], [4, 1], ValueError, r"pages\[1\] has 0 pages of 4 tokens; a request of 1 tokens needs 1"),
        ([[1]], [-1], ValueError, r"lengths\[0\]=-1 must be 0 or more"),
        ([[1]], [1, 1], ValueError, r"pages has 1 lists for 2 requests"),
        ([[1.5]], [1], TypeError, r"pages\[0\]: page is 1\.5, which is not an integer"),
        ([[1]], [1.0], TypeError, r"lengths\[0\] is 1\.0, which is not an integer"),
    ],
)
def test_pages_and_lengths_out_of_range_are_refused(
    pages: Any, lengths: Any, error: type[Exception], text: str, allocates: bool
) -> None:
    cache = cache_of(8, 4)
    if allocates:
        cache.allocate(12)
    with pytest.raises(error, match=text):
        cache.check_pages(pages, lengths)


def test_once_pages_were_handed_out_only_those_are_taken() -> None:
    cache = cache_of(8, 4)
    cache.check_pages([[5]], [4])
    pages = cache.allocate(4)
    cache.check_pages([pages], [4])
    with pytest.raises(ValueError, match=r"pages\[0\] holds page 5, which is not in use"):
        cache.check_pages([[5]], [4])
    cache.free(pages)
    with pytest.raises(ValueError, match=r"pages\[0\] holds page 1, which is not in use: it was freed before"):
        cache.check_pages([pages], [4])
