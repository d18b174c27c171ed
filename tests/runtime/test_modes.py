"""The modes ``strict`` and ``unsafe``, and the switch that turns all of it off."""

from __future__ import annotations

import copy

import pytest
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.models import T2, tokens
from tests.runtime.bodies import both_ways, check, check_replayed, compiled, ready, replays, run, small


@both_ways
def test_strict_raises_where_no_graph_would_be_replayed(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = compiled(way, module, strict=True)
    if way == "torch.compile":
        with pytest.raises(fgc.FallbackError, match="one fixed token count"):
            run(body, 5)
        run(body, 6)
    check_replayed(body, eager, 7, 12)
    with pytest.raises(fgc.FallbackError, match=r"more tokens than the largest bucket \(40 tokens, largest bucket 16"):
        run(body, 40)
    assert fgc.report(body).fallbacks[Reason.OVER_LADDER] == 1
    check_replayed(body, eager, 7, 12)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-2, keepdim=True)  # over the tokens


def mixing() -> nn.Module:
    # Two layers: after the last attention call it would belong to the tail, which runs on real rows.
    return T2(layers=2, mlp=Mixing()).eval()


@both_ways
def test_an_unproven_body_runs_compiled_and_the_report_names_the_line(way: str) -> None:
    module = mixing()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    check(body, eager, 5, 7, 12)
    report = fgc.report(body)
    assert not report.replays
    assert report.fallbacks[Reason.UNPROVEN] >= 2
    line = Mixing.forward.__code__.co_firstlineno + 1
    for text in (report.proof, report.details[Reason.UNPROVEN]):
        assert "mean" in text
        assert f"test_modes.py:{line}" in text
    assert "mean" in str(report)


@both_ways
def test_unsafe_error_raises_with_node_and_line(way: str) -> None:
    body = compiled(way, mixing(), unsafe="error")
    line = Mixing.forward.__code__.co_firstlineno + 1
    if way == "torch.compile":
        run(body, 5)  # one size: nothing is padded, so nothing is unsafe
    for n in (6, 7):
        with pytest.raises(fgc.FallbackError, match=rf"mean.*test_modes.py:{line}.*unsafe='error'"):
            run(body, n)


@both_ways
def test_the_switch_turns_all_of_it_into_a_plain_call(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLGRAPH_COMPILE_DISABLE", "1")
    module = small()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    check(body, eager, 5, 6, 7, 12)
    assert "forward" not in module.__dict__
    assert fgc.report(body).compiles == 0
    assert "FULLGRAPH_COMPILE_DISABLE" in fgc.explain(body, input_ids=tokens(7)[None])


def test_the_switch_is_read_at_each_call_of_fgc_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    before = replays(body)
    monkeypatch.setenv("FULLGRAPH_COMPILE_DISABLE", "1")
    check(body, eager, 7, 12)
    assert replays(body) == before
    assert "FULLGRAPH_COMPILE_DISABLE" in fgc.explain(body, input_ids=tokens(7)[None])
    monkeypatch.setenv("FULLGRAPH_COMPILE_DISABLE", "0")
    check_replayed(body, eager, 7, 12)
