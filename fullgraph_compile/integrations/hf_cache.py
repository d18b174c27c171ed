"""The keys and values that transformers decodes with, out of a traced prefill."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.packing import Packing
from fullgraph_compile.integrations.plain import NotServed

# What transformers calls the cache, in calls and in outputs: the first from 5.24 on.
NAMES = ("cache", "past_key_values")


def name_in(names: Iterable[str]) -> str:
    """The one of ``NAMES`` that the parameters of a forward have."""
    return next((name for name in NAMES if name in names), NAMES[-1])


class KeyValues(Cache):
    """Stands in for an empty cache while a prefill is traced: keeps what each layer gives it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        # One pair for each layer, in order: what fills the cache afterwards knows them by their place.
        if layer_idx != len(self.keys):
            raise NotServed(Reason.ARGUMENTS, f"layer {layer_idx} updates the cache out of order")
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def keeping_keys(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is given ``use_cache=True`` returns its outputs without the cache, keys, and values."""

    name = name_in(inspect.signature(forward).parameters)

    def traced(module: nn.Module, **kwargs: Any) -> Any:
        if not kwargs.get("use_cache"):
            return forward(module, **kwargs)
        cache = KeyValues()
        outputs = forward(module, **{name: cache}, **kwargs)
        return {k: v for k, v in outputs.items() if k not in NAMES}, cache.keys, cache.values

    return traced


def fresh_cache(given: Any, module: nn.Module) -> DynamicCache:
    """The cache to fill: the caller's, or a new one.

    Raises:
        NotServed: the caller's cache is of another kind, or holds tokens already, as in decoding.
    """
    if given is None:
        config: Any = module.config
        return DynamicCache(config=config)
    if type(given) is not DynamicCache or given.offloading:
        raise NotServed(Reason.ARGUMENTS, f"the cache is a {type(given).__name__}; only a DynamicCache is filled")
    if given.get_seq_length():
        raise NotServed(Reason.ARGUMENTS, f"the cache holds {given.get_seq_length()} tokens")
    kinds = {type(layer) for layer in given.layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        raise NotServed(Reason.ARGUMENTS, f"the cache has a {min(k.__name__ for k in kinds)}")
    return given


def fill(cache: DynamicCache, keys: Sequence[Tensor], values: Sequence[Tensor], packing: Packing | None) -> None:
    """Give each layer's keys and values, ``[1, kv_heads, T, head_size]``, to a cache, as a padded batch."""
    if cache.layers and len(cache.layers) != len(keys):
        raise NotServed(Reason.ARGUMENTS, f"{len(keys)} layers update the cache, which has {len(cache.layers)}")
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(_padded(key, packing), _padded(value, packing), layer)


def _padded(packed: Tensor, packing: Packing | None) -> Tensor:
    if packing is None or packing.trivial:
        return packed
    return packing.unpack(packed[0].transpose(0, 1)).transpose(1, 2)
