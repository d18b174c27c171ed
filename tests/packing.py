"""Packed calls of a compiled body, and each request alone through eager, which says what they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from tests.models import T2

TAPE: dict[str, Any] = {"graphs": "tape", "compiler": "aot_eager"}
# Where neither what is generated nor what two layers share is in question.
FAST: dict[str, Any] = {"graphs": "tape", "compiler": "eager"}
ONE: dict[str, Any] = {"num_hidden_layers": 1}


def per_request(model: nn.Module, ids: Tensor, lengths: list[int]) -> Tensor:
    """Each request alone through the model as it was: the meaning of a packed batch."""
    rows, start = [], 0
    with torch.no_grad():
        for n in lengths:
            if n:
                positions = torch.arange(n)[None]
                one = ids[None, start : start + n]
                kwargs = {} if isinstance(model, T2) else {"use_cache": False}
                out = model(input_ids=one, position_ids=positions, **kwargs)
                rows.append(out if isinstance(out, Tensor) else out[0])
            start += n
    return torch.cat(rows, dim=1)[0]


def packed(body: nn.Module, ids: Tensor, lengths: list[int], **kwargs: Any) -> Tensor:
    batch = fgc.PrefillBatch(lengths, device="cpu")
    with torch.inference_mode(), batch:
        out = body(input_ids=ids[None], position_ids=batch.position_ids[None], **kwargs)
    return (out if isinstance(out, Tensor) else out[0])[0]


def replays(body: Any) -> int:
    return sum(fgc.report(body).replays.values())


def equal(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5 * float(want.abs().max()))
