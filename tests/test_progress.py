"""A progress bar shows compile and capture by phase, and nothing is shown where nobody looks."""

from __future__ import annotations

import pytest
import torch

import fullgraph_compile as fgc
from tests.models import tiny, tokens


@pytest.mark.parametrize("shown", [True, False])
def test_the_phases_are_named_on_stderr(shown: bool, capfd: pytest.CaptureFixture[str]) -> None:
    body = fgc.compile(tiny("Llama"), buckets=[8, 16], graphs="tape", compiler="eager", progress=shown)
    with torch.no_grad():
        body(input_ids=tokens(5)[None], use_cache=False)
    said = capfd.readouterr().err
    for phase in ("tracing", "compiling (eager)", "warming up", "capturing"):
        assert (f"full_prefill: {phase}" in said) == shown


def test_a_choice_of_buckets_shows_its_phases(capfd: pytest.CaptureFixture[str]) -> None:
    body = fgc.compile(tiny("Llama"), buckets="measured", max_tokens=16, graphs="tape", compiler="eager", progress=True)
    with torch.no_grad():
        body(input_ids=tokens(5)[None], use_cache=False)
    said = capfd.readouterr().err
    for phase in ("forecasting memory", "timing graphs", "timing without graphs"):
        assert f"full_prefill: {phase}" in said
