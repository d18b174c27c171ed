"""The positions of a packed call: what the model itself would take for each token of the padded one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.host_values import to_device
from fullgraph_compile.integrations.hf_facts import default_positions
from fullgraph_compile.integrations.packing import Packing
from fullgraph_compile.integrations.plain import NotServed

if TYPE_CHECKING:
    from fullgraph_compile.integrations.transformers import TransformersModule


def as_padded(given: Any, rows: int, columns: int) -> Tensor | None:
    """Positions that are given: ``[b, S]`` or ``[axes, b, S]``, b = 1 or B, of ``[S]`` too.

    Raises:
        NotServed: they are no such tensor.
        ValueError: they are not those of the call.
    """
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


def packed_positions(
    front: TransformersModule,
    ids: Tensor | None,
    given: Tensor | None,
    packing: Packing,
    batch: PrefillBatch,
    active: PrefillBatch | None,
) -> Tensor | None:
    """Always given where the model takes any, so that calls with and without are one graph.

    Args:
        ids: ``input_ids``, if they are what is called with.
        given: what ``as_padded`` gives.
        batch: that of the call.
        active: the batch that the caller is inside of.
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
    if rule == "columns" or (rule == "ranks" and not packing.spans.left):
        return batch.row_of_positions if packing.trivial else packing.column_of_token[None]
    if rule == "ranks":
        return batch.row_of_positions
    past = front.facts.padding if front.facts is not None else -1
    if packing.trivial and batch.requests > 1:
        return _ids_positions_of_packed(past, ids, batch)
    found = default_positions(rule, past, ids, columns, packing.device)
    return packing.pack(found.expand(rows, columns))


def _ids_positions_of_packed(past: int, ids: Tensor | None, batch: PrefillBatch) -> Tensor:
    """The rule "ids" for requests in one row, each counted from its own first token."""
    if ids is None:
        return batch.row_of_positions + past + 1
    real = ids.ne(past).long()
    count = real.cumsum(1)
    new = np.array(batch.new_tokens)
    first = to_device(np.repeat(np.cumsum(new) - new, new), ids.device)
    return (count - (count - real)[:, first]) * real + past
