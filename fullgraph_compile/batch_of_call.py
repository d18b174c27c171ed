"""Whether a batch describes a call, and which requests a call's own positions describe."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch, same_device


def check_batch(batch: PrefillBatch, tokens: int, device: torch.device) -> None:
    """Raise ``ValueError`` unless the batch describes a call of ``tokens`` rows on ``device``."""
    if batch.tokens != tokens:
        raise ValueError(
            f"{batch!r}: new_tokens add up to {batch.tokens}, but the call has {tokens} tokens; they must be equal"
        )
    if not same_device(batch.device, device):
        raise ValueError(
            f"{batch!r} is on {batch.device}, the body on {device}; give PrefillBatch(..., device={str(device)!r})"
        )


def restarts(position_ids: Tensor) -> list[int]:
    """New tokens of each request, as transformers reads packed positions: a request starts where they do not
    go on by one."""
    positions = position_ids.reshape(-1).cpu().numpy()
    starts = np.flatnonzero(np.diff(positions) != 1) + 1
    return np.diff([0, *starts.tolist(), len(positions)]).tolist()
