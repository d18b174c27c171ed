"""A piece with long products is compiled once more for few tokens; what runs depends on the token count alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullgraph_compile import compilers
from fullgraph_compile.compilers import FEW, FEW_HINT, TraceAgain, compile_piece
from fullgraph_compile.passes.common import placeholders, value_of
from fullgraph_compile.passes.split_products import MOST_TOKENS
from tests.tracing import TOKENS, trace


def piece(rows: int = 8, columns: int = 256, backed: bool = False):
    """A linear of bfloat16, and its fake inputs."""
    linear = nn.Linear(columns, rows, bias=False).bfloat16().requires_grad_(False)
    gm, _ = trace(linear, torch.zeros(TOKENS, columns).bfloat16(), backed=backed)
    return gm, [value_of(n) for n in placeholders(gm)]


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled: by the hint for few tokens, None for the others.  Nothing is."""
    hints: list[int | None] = []

    def backed(gm, examples, hint=None, **patches):
        assert patches == ({} if hint is None else FEW)
        hints.append(hint)
        return lambda *args: "others" if hint is None else "few"

    monkeypatch.setattr(compilers, "_inductor_backed", backed)
    monkeypatch.setattr(compilers, "_inductor", lambda gm, examples: backed(gm, examples))
    monkeypatch.setattr(compilers, "_on_gpu", lambda examples: True)
    return hints


def call(run, examples, tokens: int):
    return run(*[tokens if isinstance(e, torch.SymInt) else e for e in examples])


@pytest.mark.parametrize("backed", [False, True])
def test_few_tokens_run_what_was_compiled_for_them(compiled, backed):
    gm, examples = piece(backed=backed)
    run = compile_piece(gm, examples, "inductor")
    assert compiled == [None, FEW_HINT]
    assert [call(run, examples, n) for n in (2, MOST_TOKENS, MOST_TOKENS + 1)] == ["few", "few", "others"]


def test_what_is_not_captured_is_compiled_once(compiled):
    gm, examples = piece()
    assert call(compile_piece(gm, examples, "inductor", captured=False), examples, 2) == "others"
    assert compiled == [None]


def test_a_piece_without_long_products_is_compiled_once(compiled):
    gm, examples = piece(rows=512)
    assert call(compile_piece(gm, examples, "inductor"), examples, 2) == "others"
    assert compiled == [None]


def test_two_unknown_sizes_are_not_taken_for_one_token_count(compiled):
    linear = nn.Linear(256, 8, bias=False).bfloat16().requires_grad_(False)

    def body(x, y):
        return linear(x), y * 2

    inputs = torch.zeros(TOKENS, 256).bfloat16(), torch.zeros(7)
    torch._dynamo.reset()
    seen = []

    def backend(gm, examples):
        nodes = placeholders(gm)
        seen.append(compile_piece(gm, [value_of(n) for n in nodes], "inductor"))
        return gm.forward

    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.compile(body, backend=backend)(*inputs)
    assert seen and compiled == [None]


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError("no lowering"), False), (TraceAgain("again"), True)])
def test_a_refusal_for_few_tokens_leaves_the_piece_as_it_was(compiled, monkeypatch, error, raised):
    taken = compilers._inductor_backed

    def refuses(gm, examples, hint=None, **patches):
        if hint is not None:
            raise error
        return taken(gm, examples)

    monkeypatch.setattr(compilers, "_inductor_backed", refuses)
    gm, examples = piece()
    if raised:
        with pytest.raises(TraceAgain):
            compile_piece(gm, examples, "inductor")
    else:
        assert call(compile_piece(gm, examples, "inductor"), examples, 2) == "others"


def test_inductor_knows_what_is_asked_of_it_for_few_tokens():
    from torch._inductor import config

    with config.patch(FEW):
        assert config.combo_kernels
