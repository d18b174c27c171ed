"""The paged KV cache: the memory of all sites, and who holds which page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fullgraph_compile.ops import AttentionSite

SiteShape = AttentionSite | tuple[int, int, int]
"""A site, or its (kv_heads, head_size, value_head_size)."""

# What attention backends read.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Page ids are staged as int32.
_MAX_PAGES = 2**31 - 1


class OutOfPages(RuntimeError):
    """The cache has fewer free pages than were asked for.  Nothing was handed out: free some and ask again."""


class PagedKVCache:
    """K and V of all sites of a body, in pages, and an allocator of the pages.

    A request holds a list of page ids, in the order of its tokens; the same page ids hold at every site.  Page 0 is
    reserved: it stands in unused cells of the page table and takes what padded tokens write.

    The allocator is host code on integers: it never touches the device, and hands pages out without clearing them.
    It is not thread-safe.  An engine that keeps its own page ids (1 ... pages - 1) need not use it.

    Args:
        sites: what each site keeps, in the order of the attention calls: ``AttentionSite`` or
            (kv_heads, head_size, value_head_size).
        pages: page count, the reserved one included; 2 or more.
        page_size: tokens in a page, 1 or more.
        dtype: float32, float16 or bfloat16; that of the model's keys.
        device: where the model computes.

    Attributes:
        k: for each site ``[pages, page_size, kv_heads, head_size]``, contiguous, zeros at first.
        v: for each site ``[pages, page_size, kv_heads, value_head_size]``, contiguous, zeros at first.
        sites: (kv_heads, head_size, value_head_size) of each site.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is out of range, there is no site, or the dtype is another one.

    Example:
        >>> cache = PagedKVCache.for_model(model, pages=1024)
        >>> pages = cache.allocate(tokens=30)
        >>> with torch.inference_mode(), PrefillBatch([30], cache=cache, pages=[pages]):
        ...     body(input_ids=ids[None], use_cache=False)
        >>> cache.append(pages, 30, 1)      # room for the token that follows
        >>> cache.free(pages)
    """

    def __init__(
        self,
        sites: Sequence[SiteShape],
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if not sites:
            raise ValueError("sites is empty; give (kv_heads, head_size, value_head_size) for each attention call")
        self.sites = tuple(_shape(i, site) for i, site in enumerate(sites))
        self.pages = _integer("pages", pages)
        self.page_size = _integer("page_size", page_size)
        if self.page_size < 1:
            raise ValueError(f"page_size={page_size} must be 1 or more")
        if not 2 <= self.pages <= _MAX_PAGES:
            raise ValueError(
                f"pages={pages} must be 2 ... {_MAX_PAGES}: page 0 is reserved for padded tokens, and requests need one"
            )
        if dtype not in _DTYPES:
            raise ValueError(
                f"dtype={dtype} is not one that a cache can hold; valid are {', '.join(map(str, _DTYPES))}"
            )
        self.dtype = dtype
        # Normal tensors, so that they can be written in inference mode and outside of it.
        with torch.inference_mode(False):
            self.k, self.v = (
                tuple(
                    torch.zeros(self.pages, self.page_size, site[0], site[size], dtype=dtype, device=device)
                    for site in self.sites
                )
                for size in (1, 2)
            )
        self.device = self.k[0].device
        self._free = list(range(self.pages - 1, 0, -1))  # a stack, lowest page on top
        self._holders: dict[int, int] = {}  # page -> how many lists hold it; only pages in use
        self._allocates = False

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        pages: int,
        page_size: int = 16,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> PagedKVCache:
        """A cache for the sites of a model.

        They are those that were traced if the model is compiled and was called or warmed up; else those that the
        config of a transformers model describes.

        Args:
            model: what ``torch.compile`` or ``fgc.compile`` returned, or the module itself.
            dtype: None = that of the model.
            device: None = that of the model.

        Raises:
            ValueError: neither says what the sites keep.
        """
        from fullgraph_compile.api import report

        traced = report(model).sites
        weights = [p for p in model.parameters() if p.is_floating_point()]
        if dtype is None:
            dtype = traced[0].dtype if traced else weights[0].dtype if weights else torch.get_default_dtype()
        if device is None:
            device = weights[0].device if weights else torch.get_default_device()
        sites = traced or _sites_of_config(model)
        return cls(sites, pages=pages, page_size=page_size, dtype=dtype, device=device)

    def addresses(self) -> tuple[int, ...]:
        """Where K and V of each site lie.  A captured graph holds these, so they are compared before each launch."""
        return tuple(t.data_ptr() for t in (*self.k, *self.v))

    @property
    def capacity(self) -> int:
        """Tokens that all pages but the reserved one hold."""
        return (self.pages - 1) * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    # -- allocator -----------------------------------------------------------------------------------------------

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
        if _integer(name, tokens) < 0:
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

    def check_sites(self, sites: Sequence[SiteShape]) -> None:
        """Refuse a body whose sites keep something else than this cache.

        Raises:
            ValueError: the count differs, or a site's head count, head size or dtype.
        """
        if len(sites) != len(self.sites):
            raise ValueError(f"the cache has {len(self.sites)} sites, the body has {len(sites)}")
        for i, site in enumerate(sites):
            name = f"site {i}{f' ({site.module or site.node})' if isinstance(site, AttentionSite) else ''}"
            if _shape(i, site) != self.sites[i]:
                raise ValueError(f"{name} keeps {_words(_shape(i, site))}, the cache has {_words(self.sites[i])} there")
            if isinstance(site, AttentionSite) and site.dtype != self.dtype:
                raise ValueError(f"{name} computes in {site.dtype}, the cache holds {self.dtype}")

    def _check_held(self, name: str, pages: Sequence[int]) -> None:
        self._check_range(name, pages)
        for page in pages:
            if page not in self._holders:
                raise ValueError(
                    f"{name} holds page {page}, which is not in use: it was freed before, or this cache never handed "
                    "it out"
                )

    def _check_range(self, name: str, pages: Sequence[int]) -> None:
        if not set(map(type, pages)) <= {int}:
            for page in pages:
                _integer(f"{name}: page", page)
        if len(pages) and not (min(pages) > 0 and max(pages) < self.pages):
            wrong = next(page for page in pages if not 0 < page < self.pages)
            reserved = " (page 0 is reserved for padded tokens)" if wrong == 0 else ""
            raise ValueError(f"{name} holds page {wrong}; valid are 1 ... {self.pages - 1}{reserved}")
        if len(set(pages)) != len(pages):
            twice = next(page for i, page in enumerate(pages) if page in pages[:i])
            raise ValueError(f"{name} holds page {twice} twice")

    def __repr__(self) -> str:
        size = sum(t.numel() * t.element_size() for t in (*self.k, *self.v)) / 2**20
        return (
            f"PagedKVCache({len(self.sites)} sites, {self.pages} pages of {self.page_size}, {self.free_pages} free, "
            f"{self.dtype}, {self.device}, {size:.1f} MiB)"
        )


def _shape(index: int, site: SiteShape) -> tuple[int, int, int]:
    if isinstance(site, AttentionSite):
        site = (site.kv_heads, site.head_size, site.value_head_size)
    try:
        heads, head_size, value_head_size = (_integer(f"sites[{index}]: a size", n) for n in site)
    except ValueError:
        raise ValueError(f"sites[{index}]={site!r} must be (kv_heads, head_size, value_head_size)") from None
    if min(heads, head_size, value_head_size) < 1:
        raise ValueError(f"sites[{index}]={site!r} holds a size below 1")
    return heads, head_size, value_head_size


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}, which is not an integer")
    return int(value)


def _counted(pages: int) -> str:
    return f"{pages} page{'s' * (pages != 1)}"


def _words(shape: tuple[int, int, int]) -> str:
    heads, size, value_size = shape
    return f"{heads} KV heads of {size}" if size == value_size else f"{heads} KV heads of {size}/{value_size}"


# Settings of transformers' configs that give some layers another geometry than the rest, or no KV of their own.
_UNEVEN = ("global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "block_configs", "multi_query")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def _sites_of_config(model: Any) -> list[tuple[int, int, int]]:
    """What the config of a transformers model says of its sites; ``check_sites`` tells whether it is true."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    unclear = [name for name in _UNEVEN if getattr(config, name, None)]
    unclear += sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if not (isinstance(layers, int) and isinstance(heads, int)) or unclear:
        why = f"its config has {', '.join(unclear)}" if unclear else "it has no config that does"
        raise ValueError(
            f"{type(model).__name__} does not say what its attention keeps ({why}): compile and warm it up first, or "
            "give PagedKVCache the sites"
        )
    if getattr(config, "kv_lora_rank", None):
        # Latent attention as transformers computes it: keys and values are expanded to all heads.
        return [(heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)] * layers
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [(kv_heads, size, size)] * layers
