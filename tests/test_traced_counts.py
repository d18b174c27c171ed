"""Models that take another branch for some token counts: each branch is a trace, and each replays."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import fullgraph_compile as fgc
from tests.models import T2, tokens


class OneTokenApart(T2):
    """Computes something else for a single token."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = super().forward(input_ids, position_ids)
        return x if input_ids.shape[-1] > 1 else 3 * x


def test_a_branch_for_one_token_replays_in_a_bucket_of_its_own() -> None:
    body: Any = OneTokenApart().eval()
    eager = copy.deepcopy(body)
    fgc.compile(body, buckets=[8, 16], graphs="tape", compiler="eager")
    for count in (5, 1, 1, 9, 1):
        ids, positions = tokens(count)[None], torch.arange(count)[None]
        with torch.no_grad():
            torch.testing.assert_close(body(ids, positions), eager(ids, positions), rtol=1e-5, atol=1e-5)
    report = fgc.report(body)
    assert report.replays == {1: 3, 8: 1, 16: 1}
    assert not report.fallbacks


def test_a_branch_beyond_the_ladder_gets_no_bucket() -> None:
    body: Any = OneTokenApart().eval()
    fgc.compile(body, buckets=[8], graphs="tape", compiler="eager")
    for count in (5, 9):
        with torch.no_grad():
            body(tokens(count)[None], torch.arange(count)[None])
    report = fgc.report(body)
    assert report.replays == {8: 1}
    assert report.fallbacks == {fgc.Reason.OVER_LADDER: 1}
