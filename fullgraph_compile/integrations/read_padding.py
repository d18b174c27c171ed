"""Padded positions that a head or a loss reads, and that a packed call does not compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.plain import NotServed


@dataclass(frozen=True)
class ReadPositions:
    """Which positions of a padded batch a head and a loss read.

    A head of transformers on a decoder that pools takes the last column where no id pads, or where it is given no ids,
    and else the last one whose id does not pad, whatever ``attention_mask`` says.

    Attributes:
        name: the model's, for messages.
        padding: the id that pads, or -1.
        last_column: why a head reads the last column; empty = it does not.
        ids: ``[B, S]``, if a head reads the last that is not ``padding``.
        labels: ``[B, S]``, of a loss; None = there is none.
        shifted: whether a label may be that of the position before it.
        ignored: the label that stands for none.
    """

    name: str
    padding: int
    last_column: str = ""
    ids: Tensor | None = None
    labels: Tensor | None = None
    shifted: bool = False
    ignored: int = -100

    def on_host(self, mask: Tensor | None) -> tuple[ReadPositions, Tensor | None, int]:
        """The same on the host, the mask too, and how often the device was read for it: once at most."""
        named = {"ids": self.ids, "labels": self.labels, "mask": mask}
        away = {name: t for name, t in named.items() if t is not None and t.device.type != "cpu"}
        if not away:
            return self, mask, 0
        if "mask" in away:
            away["mask"] = away["mask"] != 0
        here = dict(zip(away, torch.stack([t.long() for t in away.values()]).cpu(), strict=True))
        mask = here.pop("mask", mask)
        return replace(self, **here), mask, 1

    def check(self, real: Tensor) -> None:
        """Raise ``NotServed`` if one of them is padding.

        Args:
            real: ``[B, S]`` bool: where there are tokens; on the host, as this is.
        """
        if self.last_column and not bool(real[:, -1].all()):
            why = f"{self.name} {self.last_column}, so it pools the last column, which is padding"
            raise NotServed(Reason.MASK, why)
        if self.ids is not None:
            last = (torch.arange(real.shape[1]) * (self.ids != self.padding)).argmax(-1, keepdim=True)
            if not bool(real.gather(1, last).all()):
                why = f"pools the last id that is not pad_token_id ({self.padding}), which is padding in some row"
                raise NotServed(Reason.MASK, f"{self.name} {why}")
        if self.labels is not None:
            counts = self.labels != self.ignored
            read = counts & ~real
            if self.shifted:
                read[:, 1:] |= counts[:, 1:] & ~real[:, :-1]
            if bool(read.any()):
                raise NotServed(
                    Reason.MASK,
                    "the loss reads padding: a label there, or the first token after it, is none of those that are "
                    f"ignored ({self.ignored})",
                )


def real_positions(mask: Tensor | None, lengths: Sequence[int], columns: int) -> Tensor:
    """``[B, S]`` bool on the host: where a padded batch has tokens; ``lengths`` counts where there is no mask."""
    if mask is not None:
        return mask != 0
    return torch.arange(columns) < torch.tensor(lengths)[:, None]
