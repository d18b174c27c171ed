"""Attention by flex_attention, whose functions are not read: it is refused by its name, and requests never meet."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from fullgraph_compile.dispatch import FallbackError
from tests.runtime.bodies import compiled, equal


def _causal(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.where(query >= key, score, -float("inf"))


class Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, score_mod=_causal).transpose(1, 2).flatten(2)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("way", ["compile", "torch.compile"])
def test_flex_attention_is_refused_by_its_name(way: str, caplog: pytest.LogCaptureFixture) -> None:
    module = Flexible().eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    with torch.no_grad():
        for n in (5, 6, 7, 5):
            x = torch.randn(1, n, 32)
            equal(body(x), eager(x))
        with pytest.raises(FallbackError, match="flex_attention"), fgc.PrefillBatch([3, 4]):
            body(torch.randn(1, 7, 32))
    report = fgc.report(body)
    assert "flex_attention" in report.details[Reason.UNMARKED]
    assert set(report.fallbacks) <= {Reason.UNMARKED, Reason.STATIC_SHAPE}
    assert "Traceback" not in caplog.text
