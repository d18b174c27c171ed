"""A body whose rows tell requests apart only by the call serves a batch of several by one call each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from tests.models import T2, tokens


class CountsItself(T2):
    """Positions are the row numbers of the call."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, torch.arange(input_ids.shape[-1])[None])


@pytest.mark.parametrize("graphs", ["tape", "none"])
def test_each_request_is_served_alone_with_and_without_graphs(graphs: str) -> None:
    body: Any = CountsItself().eval()
    eager = copy.deepcopy(body)
    fgc.compile(body, buckets=[8, 16], graphs=graphs, compiler="eager")
    for lengths in ([5], [3, 4], [1, 6, 2], [0, 5], [0, 0]):
        ids = tokens(sum(lengths))[None]
        with torch.no_grad(), fgc.PrefillBatch(lengths, device="cpu"):
            got = body(ids)
        with torch.no_grad():
            alone = [eager(part) for part in ids.split(lengths, dim=1) if part.shape[1]]
        want = torch.cat(alone, dim=1) if alone else torch.empty(1, 0, 32)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
