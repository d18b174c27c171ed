"""Results that the traced code rounds are rounded, whatever a compiler fuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fullgraph_compile.passes.common import op_name, value_of
from fullgraph_compile.passes.keep_rounding import keep_rounding, round_to_bfloat16
from tests.tracing import TOKENS, trace

WEIGHT = torch.linspace(0.5, 1.5, 32)
ANGLES = torch.linspace(0, 1, 4 * 32).view(4, 32)


def add_and_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """As SGLang writes it: the sum is rounded for the layers after it, and not for the norm."""
    total = x.to(torch.float32) + residual.to(torch.float32)
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * WEIGHT
    return normed.to(x.dtype), total.to(x.dtype)


def turned(x: Tensor, residual: Tensor, positions: Tensor) -> Tensor:
    hidden, residual = add_and_norm(x, residual)
    angles = ANGLES.index_select(0, positions).to(x.dtype)
    # Fused with what is above, these go on with what it has before it rounds.
    return hidden * 3 + residual.to(torch.float32).sin() + angles * 0


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, residual = torch.randn(2, TOKENS, 32).to(dtype)
    return x, residual, torch.arange(TOKENS) % 4


def test_each_number_is_rounded_as_a_cast_rounds_it() -> None:
    torch.manual_seed(0)
    ties = (torch.randint(0, 2**15, (4096,), dtype=torch.int32) << 16) | 0x8000
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-45, -1e-40, 1.0])
    half = ties.view(torch.float32)
    half = half[half.isfinite()]
    for x in (torch.randn(4096) * 10 ** torch.randn(4096), half, -half, special):
        want = x.to(torch.bfloat16).to(torch.float32)
        assert torch.equal(round_to_bfloat16(x).view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001])
def test_what_is_no_number_stays_none(bits: int) -> None:
    x = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert round_to_bfloat16(x).isnan().all()


def test_what_is_computed_from_half_precision_is_rounded_and_a_table_is_not() -> None:
    gm, _ = trace(turned, *inputs())
    casts = [n for n in gm.graph.nodes if op_name(n) == "to" and value_of(n).dtype == torch.bfloat16]
    assert len(casts) == 3
    keep_rounding(gm)
    gm.graph.lint()
    rounded = [n for n in casts if n.args[0].target is torch.where]
    assert len(rounded) == 2
    assert all(value_of(n.args[0]).dtype == torch.float32 for n in rounded)
    # With a function of another package torch keeps nothing of what it compiles on disk.
    of = {n.target.__module__.partition(".")[0] for n in gm.graph.nodes if n.op == "call_function"}
    assert of <= {"torch", "_operator"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_as_they_are(dtype: torch.dtype) -> None:
    gm, _ = trace(turned, *inputs(dtype))
    keep_rounding(gm)
    assert torch.where not in {n.target for n in gm.graph.nodes}


def test_compiled_it_gives_what_the_code_itself_gives() -> None:
    # The residual by itself: without the pass what reads it has the sum before it was rounded.
    def read(x: Tensor, residual: Tensor) -> Tensor:
        return add_and_norm(x, residual)[1].to(torch.float32) * 1.0

    def backend(gm: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(keep_rounding(gm), examples)

    x, residual, _ = inputs()
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(read, backend=backend)(x, residual), read(x, residual))
        torch._dynamo.reset()
        assert not torch.equal(torch.compile(read)(x, residual), read(x, residual))
