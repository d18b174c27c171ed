"""The paged KV cache: the memory of all sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.page_allocator import PageAllocator, as_integer

SiteShape = AttentionSite | tuple[int, int, int]
"""A site, or its (kv_heads, head_size, value_head_size)."""

# What attention backends read.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PagedKVCache(PageAllocator):
    """K and V of all sites of a body, in pages, and an allocator of the pages.

    A request holds a list of page ids, in the order of its tokens; the same page ids hold at every site.  Page 0 is
    reserved: it stands in unused cells of the page table and takes what padded tokens write.  An engine that keeps its
    own page ids (1 ... pages - 1) need not use the allocator.

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
        super().__init__(pages, page_size)
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
        """Where K and V of each site lie.  A captured graph holds these: elsewhere it is captured anew."""
        return tuple(t.data_ptr() for t in (*self.k, *self.v))

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
        heads, head_size, value_head_size = (as_integer(f"sites[{index}]: a size", n) for n in site)
    except ValueError:
        raise ValueError(f"sites[{index}]={site!r} must be (kv_heads, head_size, value_head_size)") from None
    if min(heads, head_size, value_head_size) < 1:
        raise ValueError(f"sites[{index}]={site!r} holds a size below 1")
    return heads, head_size, value_head_size


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
