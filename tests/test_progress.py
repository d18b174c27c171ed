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
    for phase in ("compiling (eager)", "warming up", "capturing"):
        assert (f"full_prefill: {phase}" in said) == shown
