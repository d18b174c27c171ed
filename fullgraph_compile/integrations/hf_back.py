"""From a packed result of a transformers model to what the caller of it expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations import hf_cache
from fullgraph_compile.integrations.hf_facts import Facts
from fullgraph_compile.integrations.packing import Packing
from fullgraph_compile.integrations.plain import NotServed

if TYPE_CHECKING:
    from fullgraph_compile.integrations.transformers import TransformersModule

# Fields of a model's output whose tensors have a row for each token: after the batch dim ...
_ROWS = frozenset(
    {"last_hidden_state", "hidden_states", "logits", "decoder_hidden_states", "encoder_last_hidden_state",
     "encoder_hidden_states"}
)  # fmt: skip
# ... or with batch and tokens in one dim.
_FLAT_ROWS = frozenset({"router_logits"})


class Back:
    """The way back of one call.

    Args:
        front: the model.
        packing: how the call was packed.
        cache: what its keys and values go into, or None.
        dicts: whether the result has names.
        requests: tokens of each request of a packed call; empty where they are one, or the rows of a padded batch.

    Attributes:
        nothing: whether the packed result is what the caller expects.
    """

    def __init__(
        self, front: TransformersModule, packing: Packing, cache: Any, dicts: bool, requests: Sequence[int] = ()
    ) -> None:
        self.front = front
        self.packing = packing
        self.cache = cache
        self.dicts = dicts
        self.requests = requests
        self._facts = front.facts or Facts(dict, None, False, None, None)
        self.nothing = packing.trivial and cache is None and dicts and self._facts.pooler is None

    def __call__(self, result: Any) -> Any:
        keys: Any = ()
        values: Any = ()
        if self.cache is not None:
            result, keys, values = result
        if not isinstance(result, dict):
            raise NotServed(Reason.ARGUMENTS, f"{self.front.name} returns a {type(result).__name__}")
        fields = dict(result.items()) if self.packing.trivial else self._padded_fields(result)
        if self._facts.pooler is not None:
            fields["pooler_output"] = self._pooled(fields["last_hidden_state"])
        if self.cache is not None:
            hf_cache.fill(self.cache, keys, values, self.packing)
            fields[hf_cache.name_in(self.front.names)] = self.cache
        output = self.front.outputs(self._facts.output, fields)
        return output if self.dicts else output.to_tuple()

    def _pooled(self, hidden: Tensor) -> Tensor:
        pooler, module = self._facts.pooler, self.front.module
        assert pooler is not None
        if not self.requests:
            return pooler(module, hidden)
        parts = [rows for rows in hidden.split(self.requests, dim=1) if rows.shape[1]] or [hidden]
        return torch.cat([pooler(module, rows) for rows in parts])

    def _padded_fields(self, result: dict[str, Any]) -> dict[str, Any]:
        done: dict[int, Tensor] = {}  # the last hidden state is also the last of all hidden states
        return {name: self._padded(name, value, done) for name, value in result.items()}

    def _padded(self, name: str, value: Any, done: dict[int, Tensor]) -> Any:
        if value is None:
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(self._padded(name, v, done) for v in value)
        known = name in _FLAT_ROWS or (name in _ROWS and isinstance(value, Tensor) and _has_rows(value, self.packing))
        if not isinstance(value, Tensor) or not known:
            raise NotServed(
                Reason.ARGUMENTS, f"{self.front.name} returns {name}, which is not known to have token rows"
            )
        if id(value) not in done:
            flat = name in _FLAT_ROWS
            done[id(value)] = self.packing.unpack(value).flatten(0, 1) if flat else self.packing.unpack(value[0])
        return done[id(value)]


def _has_rows(value: Tensor, packing: Packing) -> bool:
    return value.dim() > 1 and value.shape[:2] == (1, sum(packing.spans.lengths))
