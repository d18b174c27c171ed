"""Whole-forward prefill: one CUDA graph per token bucket, for any batch that fits.

body = torch.compile(model.model, backend="full_prefill")       # or
body = fullgraph_compile.compile(model.model)
"""

from __future__ import annotations

from fullgraph_compile.api import close, decision, explain, release, report, warmup
from fullgraph_compile.attention.conformance import check_attention, register_attention
from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.cache import PagedKVCache
from fullgraph_compile.compiled_body import compile
from fullgraph_compile.dispatch import Decision, FallbackError, Reason, Route
from fullgraph_compile.options import Options
from fullgraph_compile.page_allocator import OutOfPages
from fullgraph_compile.report import Report

__all__ = [
    "Decision",
    "FallbackError",
    "Options",
    "OutOfPages",
    "PagedKVCache",
    "PrefillBatch",
    "Reason",
    "Report",
    "Route",
    "check_attention",
    "close",
    "compile",
    "decision",
    "explain",
    "register_attention",
    "release",
    "report",
    "warmup",
]
