"""Attention that is more than causal, in models of transformers, over a cache: windows, soft caps, sinks."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fullgraph_compile as fgc
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.options import BadOption
from tests.models import VOCABULARY, tiny
from tests.paged.engine import Engine, cache_for, compiled, one_shot, texts
from tests.reports.cases import known_as

FEW: dict[str, Any] = {"buckets": [8, 64]}


def test_b39_a_soft_cap_is_applied_in_every_chunk() -> None:
    def gemma(**more: Any) -> Any:
        body = tiny("Gemma2", attn_implementation="eager", **more)
        with torch.no_grad():
            for layer in body.layers:
                layer.self_attn.q_proj.weight.mul_(12)
        return body

    body = compiled(gemma(), **FEW)
    engine = Engine(body, cache_for(body), texts(14))
    engine.step({0: 8})
    engine.step({0: 6})
    engine.check(gemma())
    uncapped = one_shot(gemma(attn_logit_softcapping=None), engine.texts[0])
    assert (torch.cat(engine.hidden[0]) - uncapped).abs().max() > 1e-2
    assert not fgc.report(body).fallbacks


@pytest.mark.parametrize("name", ["Gemma3Text", "Mistral"])
def test_b40_a_window_reaches_back_into_the_prefix(name: str) -> None:
    body, eager, full = compiled(windowed(name), **FEW), windowed(name), windowed(name, sliding_window=64)
    engine = Engine(body, cache_for(body), texts(14))
    engine.step({0: 8})
    (graph,) = body.forward.graphs()
    tables = {b: bucket.static.page_table.data_ptr() for b, bucket in graph.runner.buckets.items()}
    engine.step({0: 6})
    engine.check(eager)
    assert (one_shot(eager, engine.texts[0]) - one_shot(full, engine.texts[0])).abs().max() > 1e-2
    assert {b: bucket.static.page_table.data_ptr() for b, bucket in graph.runner.buckets.items()} == tables
    assert "window of 4" in fgc.report(body).sites[0].mask


def test_b41_sinks_count_in_every_chunk() -> None:
    body, eager = compiled(with_sinks(2.0), **FEW), with_sinks(2.0)
    engine = Engine(body, cache_for(body), texts(14, 5))
    engine.step({0: 8})
    engine.step({0: 6, 1: 5})
    engine.check(eager)
    assert (one_shot(eager, engine.texts[0]) - one_shot(with_sinks(-1e4), engine.texts[0])).abs().max() > 1e-2
    report = fgc.report(body)
    assert all(site.sinks for site in report.sites) and not report.fallbacks


class Sinkless(ReferenceAttention):
    name: ClassVar[str] = "sinkless"

    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        return ["it has no sinks"] if site.sinks else []


def test_b41_attention_without_sinks_is_refused_by_name() -> None:
    with known_as("sinkless", Sinkless), pytest.raises(BadOption, match=r"sinkless.*it has no sinks"):
        compiled(with_sinks(2.0), attention="sinkless")


# -- models ----------------------------------------------------------------------------------------------------------


def windowed(name: str, sliding_window: int = 4) -> Any:
    if name == "Mistral":
        return tiny(name, sliding_window=sliding_window)
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=sliding_window, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    body = transformers.Gemma3TextModel(config).eval()
    with torch.no_grad():
        for p in body.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return body


def with_sinks(value: float) -> nn.Module:
    body = tiny(
        "GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4, attn_implementation="eager",
        layer_types=["sliding_attention", "full_attention"], experts_implementation="batched_mm",
    )  # fmt: skip
    with torch.no_grad():
        for layer in body.layers:
            layer.self_attn.sinks.fill_(value)
    return body
