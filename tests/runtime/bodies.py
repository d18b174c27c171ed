"""Bodies compiled in both ways, calls of them, and what a call must give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.registry import compiled_for, unwrap
from fullgraph_compile.runner import BodyRunner
from tests.models import T2, tiny, tokens

OPTIONS: dict[str, Any] = {"buckets": [8, 16], "graphs": "tape", "compiler": "eager"}
WAYS = ["compile", "torch.compile"]
both_ways = pytest.mark.parametrize("way", WAYS)


def compiled(way: str, module: nn.Module, **options: Any) -> Any:
    if way == "compile":
        return fgc.compile(module, **{**OPTIONS, **options})
    return torch.compile(module, backend="full_prefill", options={**OPTIONS, **options})


def small() -> nn.Module:
    return T2(layers=1).eval()


def llama() -> nn.Module:
    return tiny("Llama", num_hidden_layers=1)


def run(body: Any, n: int, seed: int = 1, **more: Any) -> Any:
    """One call of one request of ``n`` tokens."""
    if not isinstance(getattr(body, "_orig_mod", body), T2):
        more = {"use_cache": False, **more}
    with torch.no_grad():
        return body(input_ids=tokens(n, seed)[None], position_ids=torch.arange(n)[None], **more)


def first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def equal(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=2 * tolerance * max(1.0, float(want.abs().max())))


def check(body: Any, eager: nn.Module, *sizes: int, seed: int = 1) -> None:
    for n in sizes:
        equal(first(run(body, n, seed)), first(run(eager, n, seed)))


def replays(body: Any) -> int:
    return sum(fgc.report(body).replays.values())


def check_replayed(body: Any, eager: nn.Module, *sizes: int, seed: int = 1) -> None:
    """Right, and each by a graph."""
    before = replays(body)
    check(body, eager, *sizes, seed=seed)
    assert replays(body) == before + len(sizes)


def runners(body: Any) -> list[BodyRunner]:
    return [c.runner for c in compiled_for(unwrap(body)) if isinstance(c, CapturedGraph)]


def ready(way: str, module: nn.Module, **options: Any) -> Any:
    """A body with all buckets captured."""
    body = compiled(way, module, **options)
    # Outside of fgc.compile the first call is traced for its size alone, and the second makes it symbolic.
    run(body, 5), run(body, 6)
    assert fgc.report(body).ready
    assert replays(body) >= 1
    return body


class Scaled(T2):
    def forward(self, input_ids: Tensor, position_ids: Tensor, scale: Any = 1.0) -> Tensor:
        x = (self.embed(input_ids) + self.place(position_ids)) * scale
        for layer in self.layers:
            x = layer(x)
        return x
