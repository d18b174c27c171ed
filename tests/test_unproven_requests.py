"""A body that mixes token rows serves each request of a batch alone: requests never see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from tests.models import tiny

OPTIONS: dict[str, Any] = {"max_tokens": 32, "graphs": "tape", "compiler": "eager"}


class Centred(nn.Module):
    """Takes the mean of all tokens off, which padding would change, and other requests too."""

    def __init__(self, *, pooled: bool = False) -> None:
        super().__init__()
        self.body, self.pooled = tiny("Llama"), pooled

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        x = self.body.embed_tokens(input_ids)
        x = x - x.mean(1, keepdim=True)
        rows = self.body(inputs_embeds=x, position_ids=position_ids, use_cache=False)[0]
        return (rows, rows.mean(1)) if self.pooled else rows


def test_requests_of_an_unproven_body_run_one_by_one() -> None:
    eager, body = Centred().eval(), fgc.compile(Centred().eval(), **OPTIONS)
    ids = torch.arange(1, 13)
    with torch.inference_mode():
        body(ids[None, :5], torch.arange(5)[None])
        with fgc.PrefillBatch([4, 1, 7], device="cpu") as batch:
            got = body(ids[None], batch.position_ids[None])[0]
        want = [eager(part[None], torch.arange(len(part))[None])[0] for part in ids.split([4, 1, 7])]
    torch.testing.assert_close(got, torch.cat(want), atol=1e-5, rtol=1e-4)
    assert fgc.report(body).fallbacks[fgc.Reason.UNPROVEN] >= 3


def test_a_result_that_is_no_row_of_a_token_cannot_be_put_together() -> None:
    body = fgc.compile(Centred(pooled=True).eval(), **OPTIONS)
    ids = torch.arange(1, 13)[None]
    with torch.inference_mode():
        body(ids, torch.arange(12)[None])
        with fgc.PrefillBatch([4, 8], device="cpu") as batch, pytest.raises(fgc.FallbackError, match="requests apart"):
            body(ids, batch.position_ids[None])


def test_without_a_batch_such_a_call_runs_as_the_model_itself() -> None:
    eager, body = Centred(pooled=True).eval(), fgc.compile(Centred(pooled=True).eval(), **OPTIONS)
    ids, restarting = torch.arange(1, 13)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    with torch.inference_mode():
        for positions in (torch.arange(12)[None], restarting, restarting):
            for got, want in zip(body(ids, positions), eager(ids, positions), strict=True):
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert fgc.report(body).fallbacks[fgc.Reason.SINGLE_REQUEST] == 2
