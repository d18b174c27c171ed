"""Padded positions that a head or a loss reads, and that a packed call does not compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.plain import NotServed


def real_positions(mask: Tensor | None, lengths: Sequence[int], columns: int, device: torch.device) -> Tensor:
    """``[B, S]`` bool: where a padded batch has tokens; ``lengths`` counts where there is no mask."""
    if mask is not None:
        return mask.to(device) != 0
    return torch.arange(columns, device=device) < torch.tensor(lengths, device=device)[:, None]


def check_last_token(name: str, padding: int, tokens: Tensor, real: Tensor) -> None:
    """Raise ``NotServed`` if a head that reads one row of each request reads one that is padding.

    Such heads of transformers on decoders take the last column where no id pads, or where they are given no ids, and
    else the last one whose id does not pad, whatever ``attention_mask`` says.

    Args:
        name: the model's, for the message.
        padding: the id that pads, or -1.
        tokens: ``[B, S]`` ids, or ``[B, S, width]`` embeddings.
        real: ``[B, S]`` bool.
    """
    if tokens.dim() == 3 or padding < 0:
        if not bool(real[:, -1].all()):
            why = "is given no ids" if tokens.dim() == 3 else "has no pad_token_id"
            raise NotServed(Reason.MASK, f"{name} {why}, so it pools the last column, which is padding")
        return
    read = (torch.arange(tokens.shape[1], device=tokens.device) * (tokens != padding)).argmax(-1, keepdim=True)
    if not bool(real.gather(1, read).all()):
        raise NotServed(
            Reason.MASK, f"{name} pools the last id that is not pad_token_id ({padding}), which is padding in some row"
        )


def check_labels(labels: Tensor, shifted: bool, ignored: int, real: Tensor) -> None:
    """Raise ``NotServed`` if a loss reads a position that is padding.

    Args:
        labels: ``[B, S]``.
        shifted: whether a label may be that of the position before it.
        ignored: the label that stands for none.
        real: ``[B, S]`` bool.
    """
    counts = labels.to(real.device) != ignored
    read = counts & ~real
    if shifted:
        read[:, 1:] |= counts[:, 1:] & ~real[:, :-1]
    if bool(read.any()):
        raise NotServed(
            Reason.MASK,
            "the loss reads padding: a label there, or the first token after it, is none of those that are ignored "
            f"({ignored})",
        )
