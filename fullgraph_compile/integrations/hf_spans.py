"""Which rows and columns of a transformers call are real tokens, and which requests they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch, same_device
from fullgraph_compile.batch_of_call import check_batch, restarts
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.packing import Spans, right_padded, spans_of
from fullgraph_compile.integrations.plain import NotServed

if TYPE_CHECKING:
    from fullgraph_compile.integrations.transformers import TransformersModule


def spans_and_batch(
    front: TransformersModule,
    rows: int,
    columns: int,
    mask: Any,
    positions: Tensor | None,
    active: PrefillBatch | None,
    device: torch.device,
) -> tuple[Spans, PrefillBatch, int]:
    """Where the real tokens lie, the batch, and how often the device was read for it.

    Args:
        mask: ``attention_mask``, or None.
        positions: the positions that are given, ``[b, S]`` or ``[axes, b, S]``.
        active: the batch that the caller is inside of.

    Raises:
        NotServed: the mask is not padding.
        ValueError: the batch does not describe the call.
    """
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != (rows, columns):
            raise NotServed(Reason.MASK, f"attention_mask has shape {tuple(getattr(mask, 'shape', ()))}")
        if active is not None:
            return *_spans_in_batch(rows, columns, mask, active, device), 0
        on_host = mask.device.type == "cpu"
        spans = spans_of(mask if on_host else mask.cpu())
        return spans, PrefillBatch.of_checked(_requests(spans.lengths), device), not on_host
    # Only the positions tell requests apart then, if the model asks them.
    told = positions is not None and positions.dim() == 2 and columns > 0
    told = told and front.facts is not None and front.facts.restarts
    if active is not None:
        if rows > 1:
            return *_spans_in_batch(rows, columns, None, active, device), 0
        check_batch(active, columns, device)
        return right_padded([columns], columns), active, 0
    spans = right_padded([columns] * rows, columns)
    if not told:
        return spans, PrefillBatch.of_checked(list(spans.lengths), device), 0
    assert positions is not None
    lengths = [n for row in positions.cpu().expand(rows, columns) for n in restarts(row)]
    return spans, PrefillBatch.of_checked(lengths, device), positions.device.type != "cpu"


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
