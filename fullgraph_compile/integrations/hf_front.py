"""How a transformers model is called, and how a call of it is one packed row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fullgraph_compile.batch import PrefillBatch, same_device
from fullgraph_compile.batch_of_call import check_batch, restarts
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations import hf_cache
from fullgraph_compile.integrations.hf_facts import Facts, default_positions, padding_id
from fullgraph_compile.integrations.packing import Packing, Spans, right_padded, spans_of
from fullgraph_compile.integrations.plain import Bound, NotServed

if TYPE_CHECKING:
    from fullgraph_compile.integrations.transformers import TransformersModule

# Fields of a model's output whose tensors have a row for each token: after the batch dim ...
_ROWS = frozenset(
    {"last_hidden_state", "hidden_states", "logits", "decoder_hidden_states", "encoder_last_hidden_state",
     "encoder_hidden_states"}
)  # fmt: skip
# ... or with batch and tokens in one dim.
_FLAT_ROWS = frozenset({"router_logits"})
# What a model takes and a prefill has no use for: where in the cache the tokens go.
_IGNORED = ("cache_position",)


def bind(front: TransformersModule, given: dict[str, Any], active: PrefillBatch | None) -> Bound:
    """The call as one packed row, the batch that it is for, and the way back.

    Args:
        front: the model.
        given: the arguments by name.
        active: the batch that the caller is inside of.

    Raises:
        NotServed: the call must run as it is.
        ValueError: the batch, or the positions, do not describe the call.
    """
    call = {k: v for k, v in given.items() if v is not None and k not in _IGNORED}
    dicts = call.pop("return_dict", getattr(front.module.config, "return_dict", True))
    for name in ("labels", "output_attentions"):
        if call.get(name) is not None and call[name] is not False:
            raise NotServed(Reason.ARGUMENTS, f"{name} is given")
    mask = call.pop("attention_mask", None)
    decoder_masked = _take_other_masks(call, mask)
    cache = _cache(front, call)
    leads = [n for n in ("input_ids", "inputs_embeds") if n in call]
    tokens = call[leads[0]] if leads else None
    if len(leads) != 1 or not isinstance(tokens, Tensor):
        raise NotServed(Reason.ARGUMENTS, "give exactly one of input_ids and inputs_embeds")
    if tokens.dim() != (2 if leads[0] == "input_ids" else 3):
        raise NotServed(Reason.ARGUMENTS, f"{leads[0]} has shape {tuple(tokens.shape)}")
    rows, columns = tokens.shape[:2]
    positions = _padded_positions(call.pop("position_ids", None), rows, columns)

    spans, batch, reads = _spans(front, rows, columns, mask, positions, active, tokens.device)
    if spans.left and front.reads_first_column:
        raise NotServed(Reason.MASK, f"left padding, and {front.name} pools the first column, which is padding")
    several = rows == 1 and active is not None and active.requests > 1
    if several and not front.keeps_rows:
        raise NotServed(
            Reason.ARGUMENTS,
            f"{front.name} may put rows of several requests of a packed call together; give a padded batch, or call "
            f"the {type(front.module).__name__} in it",
        )
    packing = Packing(spans, tokens.device, mask if isinstance(mask, Tensor) else None)
    if not (spans.dense or decoder_masked) and "decoder_input_ids" in front.names:
        raise NotServed(Reason.MASK, "attention_mask without decoder_attention_mask: the decoder has no padding there")
    if not packing.trivial:
        for name, value in call.items():
            if isinstance(value, Tensor):
                call[name] = _packed(name, value, packing)
    positions = _positions(front, leads[0], tokens, positions, packing, batch, active)
    if positions is not None:
        call["position_ids"] = positions
    if cache is not None and packing.trivial and batch.requests > 1:
        raise NotServed(Reason.ARGUMENTS, "use_cache is on, but a packed batch leaves no cache: give use_cache=False")
    back = Back(front, packing, cache, dicts, tuple(active.new_tokens) if several and active is not None else ())
    return Bound(call, batch, None if back.nothing else back, reads, padded=not packing.trivial)


def _take_other_masks(call: dict[str, Any], mask: Any) -> bool:
    """Take the decoder's mask out of the call, where it says the same as ``attention_mask``: whether there was one.

    Raises:
        NotServed: there is another mask; attention that is the op would know nothing of it.
    """
    for name in [n for n in call if "mask" in n]:
        value = call[name]
        same = value is mask
        if not same and isinstance(value, Tensor) and value.device.type == "cpu":
            if mask is None:
                same = value.dim() == 2 and bool((value == 1).all())
            elif isinstance(mask, Tensor) and mask.device.type == "cpu":
                same = value.shape == mask.shape and bool((value.bool() == mask.bool()).all())
        if not same or name != "decoder_attention_mask":
            raise NotServed(Reason.MASK, f"{name} is given, which is neither attention_mask nor the same for a decoder")
        del call[name]
        return True
    return False


def _cache(front: TransformersModule, call: dict[str, Any]) -> Any:
    """The empty cache that the call fills, or None; in the call, ``use_cache`` then says so."""
    several = [call.pop(name) for name in hf_cache.NAMES if name in call]
    if len(several) > 1:
        raise NotServed(Reason.ARGUMENTS, f"both {' and '.join(hf_cache.NAMES)} are given")
    given, wanted = (several or [None])[0], call.pop("use_cache", None)
    if "use_cache" not in front.names:
        if given is not None:
            raise NotServed(Reason.ARGUMENTS, "a cache is given")
        return None
    wanted = getattr(front.module.config, "use_cache", False) if wanted is None else wanted
    call["use_cache"] = False
    made = front.facts.cache if front.facts is not None else None
    if given is None and (not wanted or made is None):
        return None
    cache = hf_cache.fresh_cache(given, front.module)
    if made is not None and made is not hf_cache.DynamicCache:
        raise NotServed(Reason.ARGUMENTS, f"use_cache is on, and {front.name} makes a {made.__name__}")
    call["use_cache"] = True
    return cache


def _spans(
    front: TransformersModule,
    rows: int,
    columns: int,
    mask: Any,
    positions: Tensor | None,
    active: PrefillBatch | None,
    device: torch.device,
) -> tuple[Spans, PrefillBatch, int]:
    """Where the real tokens lie, the batch, and how often the device was read for it."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == (rows, columns)):
        raise NotServed(Reason.MASK, f"attention_mask has shape {tuple(getattr(mask, 'shape', ()))}")
    # Only the positions tell requests apart then, if the model asks them.
    told = mask is None and positions is not None and positions.dim() == 2 and columns > 0
    told = told and front.facts is not None and front.facts.restarts
    if mask is None and rows == 1:
        whole = right_padded([columns], columns)
        if active is not None:
            check_batch(active, columns, device)
            return whole, active, 0
        if not told:
            return whole, PrefillBatch([columns], device=device), 0
        assert positions is not None
        return whole, PrefillBatch(restarts(positions), device=device), positions.device.type != "cpu"
    if active is not None:
        return *_spans_in_batch(rows, columns, mask, active, device), 0
    if mask is not None:
        spans = spans_of(mask.cpu())
        return spans, PrefillBatch(_requests(spans.lengths), device=device), mask.device.type != "cpu"
    spans = right_padded([columns] * rows, columns)
    if not told:
        return spans, PrefillBatch(spans.lengths, device=device), 0
    assert positions is not None
    on_host = positions.cpu()
    lengths = [n for row in on_host.expand(rows, columns) for n in restarts(row)]
    return spans, PrefillBatch(lengths, device=device), positions.device.type != "cpu"


def _spans_in_batch(
    rows: int, columns: int, mask: Tensor | None, active: PrefillBatch, device: torch.device
) -> tuple[Spans, PrefillBatch]:
    """Where a batch gives the lengths: from the first column on, or where the mask says."""
    lengths = active.new_tokens
    if not same_device(active.device, device):
        raise ValueError(f"{active!r} is on {active.device}, the call on {device}")
    packed = rows == 1 and active.requests > 1
    if packed:
        lengths = [active.tokens]
    if len(lengths) != rows or max(lengths) > columns:
        raise ValueError(
            f"{active!r} does not describe a padded call of {rows} rows of {columns}: it needs a request for each row, "
            "of at most that many new tokens"
        )
    if mask is None:
        return right_padded(lengths, columns), active
    if mask.device.type == "cpu":
        spans = spans_of(mask)
        if list(spans.lengths) != lengths:
            raise ValueError(f"{active!r} gives other lengths than attention_mask, which has {list(spans.lengths)}")
        return spans, active
    return Spans(columns, tuple(lengths), None), active


def _requests(lengths: tuple[int, ...]) -> list[int]:
    """The requests of a padded batch: rows without a real token are none."""
    return [n for n in lengths if n] or [0]


def _padded_positions(given: Any, rows: int, columns: int) -> Tensor | None:
    """``[b, S]`` or ``[axes, b, S]``, b = 1 or B, of ``[S]`` too."""
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.dim() not in (1, 2, 3):
        raise NotServed(Reason.ARGUMENTS, "position_ids is not a tensor of one to three dims")
    positions = given[None] if given.dim() == 1 else given
    if positions.shape[-1] != columns or positions.shape[-2] not in (1, rows):
        raise ValueError(
            f"position_ids has shape {tuple(given.shape)}, but the call has {columns} tokens"
            + (f" in each of {rows} rows" if rows > 1 else "")
        )
    return positions


def _packed(name: str, value: Tensor, packing: Packing) -> Tensor:
    if value.dim() >= 2 and value.shape[1] == packing.columns and value.shape[0] in (1, packing.rows):
        return packing.pack(value.expand(packing.rows, *value.shape[1:]))
    shape = (packing.rows, packing.columns)
    raise NotServed(Reason.ARGUMENTS, f"{name} has shape {tuple(value.shape)}, but the padded batch has {shape}")


def _positions(
    front: TransformersModule,
    lead: str,
    tokens: Tensor,
    given: Tensor | None,
    packing: Packing,
    batch: PrefillBatch,
    active: PrefillBatch | None,
) -> Tensor | None:
    """Packed positions: always given where the model takes any, so that calls with and without are one graph.

    They are what the model itself would take for each token of the padded call.
    """
    rows, columns = packing.rows, packing.columns
    if given is not None:
        if packing.trivial:
            return given
        return packing.pack(given.expand(*given.shape[:-2], rows, columns), given.dim() - 2)
    rule = front.positions_for(packing.spans)
    if rule is None:
        return None
    if active is not None and any(active.cached_tokens):
        return batch.row_of_positions
    if rule == "ranks" or (rule == "columns" and packing.trivial):
        return batch.row_of_positions
    if rule == "columns":
        return packing.column_of_token[None]
    ids = tokens if lead == "input_ids" else None
    if packing.trivial and batch.requests > 1:
        return _ids_positions_of_packed(front.module, ids, batch)
    found = default_positions(rule, front.module, ids, columns, tokens.device)
    assert found is not None
    return packing.pack(found.expand(rows, columns))


def _ids_positions_of_packed(module: nn.Module, ids: Tensor | None, batch: PrefillBatch) -> Tensor:
    """The rule "ids" for requests in one row, each counted from its own first token."""
    past = padding_id(module)
    if ids is None:
        return batch.row_of_positions + past + 1
    real = ids.ne(past).long()
    count = real.cumsum(1)
    new = np.array(batch.new_tokens)
    first = torch.from_numpy(np.repeat(np.cumsum(new) - new, new)).to(ids.device)
    return (count - (count - real)[:, first]) * real + past


@dataclass(frozen=True)
class Back:
    """From a packed result to what the caller of the padded batch expects."""

    front: TransformersModule
    packing: Packing
    cache: Any
    dicts: bool
    # Tokens of each request of a packed call; empty where they are one, or the rows of a padded batch.
    requests: tuple[int, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether the packed result is what the caller expects."""
        return self.packing.trivial and self.cache is None and self.dicts is not False and self._facts.pooler is None

    @property
    def _facts(self) -> Facts:
        return self.front.facts or Facts(dict, None, False, None, None)

    def __call__(self, result: Any) -> Any:
        keys: Any = ()
        values: Any = ()
        if self.cache is not None:
            result, keys, values = result
        if not isinstance(result, dict):
            raise NotServed(Reason.ARGUMENTS, f"{self.front.name} returns a {type(result).__name__}")
        done: dict[int, Tensor] = {}  # the last hidden state is also the last of all hidden states
        fields = {name: self._padded(name, value, done) for name, value in result.items()}
        if self._facts.pooler is not None:
            parts = fields["last_hidden_state"].split(self.requests, dim=1) if self.requests else ()
            rows = [p for p in parts if p.shape[1]] or [fields["last_hidden_state"]]
            fields["pooler_output"] = torch.cat([self._facts.pooler(self.front.module, r) for r in rows])
        if self.cache is not None:
            hf_cache.fill(self.cache, keys, values, self.packing)
            fields[hf_cache.name_in(self.front.names)] = self.cache
        output = self._facts.output(**fields)
        return output.to_tuple() if self.dicts is False else output

    def _padded(self, name: str, value: Any, done: dict[int, Tensor]) -> Any:
        if self.packing.trivial or value is None:
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
