"""Long products of few tokens in parts: which are split, and that the result is that of the whole product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from fullgraph_compile.passes import split_products as module
from fullgraph_compile.passes.split_products import split_products
from tests.tracing import TOKENS, trace

ROWS, COLUMNS = 8, 256


class OnCpu(TorchFunctionMode):
    """``bmm`` with a result of another dtype, which torch has on GPUs only; notes into how many parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.bmm and "out_dtype" in kwargs:
            self.parts.append(args[0].shape[0])
            return torch.bmm(args[0].to(kwargs["out_dtype"]), args[1].to(kwargs["out_dtype"]))
        return func(*args, **kwargs)


def traced(linear: nn.Linear, x: Tensor) -> GraphModule:
    """The product and what follows it, as a piece of a body has them."""
    return trace(lambda x: linear(x) + 1, x)[0]


def linear_of(rows: int = ROWS, columns: int = COLUMNS, bias: bool = False, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias).to(dtype).requires_grad_(False)


def arguments(gm: GraphModule, linear: nn.Linear, x: Tensor) -> list[object]:
    """Values of the graph's placeholders."""
    given = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["example_value"]
            if not isinstance(value, Tensor):
                given.append(x.shape[-2])
            else:
                known = [x, *linear.parameters()]
                sizes = [tuple(t.shape) for t in known]
                form = tuple(s if isinstance(s, int) else x.shape[-2] for s in value.shape)
                given.append(known[sizes.index(form)])
    return given


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(TOKENS, COLUMNS), (1, TOKENS, COLUMNS), (1, 1, TOKENS, COLUMNS)])
def test_equals_the_whole_product(shape, bias):
    linear, x = linear_of(bias=bias), torch.randn(shape).bfloat16()
    gm = traced(linear, x)
    split = split_products(gm)
    assert split is not None
    with OnCpu() as mode:
        (got,) = split(*arguments(gm, linear, x))
    assert mode.parts == [4]
    exact = x.double() @ linear.weight.double().t() + (linear.bias.double() if bias else 0)
    want = exact.bfloat16() + 1
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    # Rounded once from fp32: off by at most the last bit of the product.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-6)
    assert not any(n.target is torch.bmm for n in gm.graph.nodes), "the piece that was given is left as it was"


@pytest.mark.parametrize(
    ("linear", "x"),
    [
        (linear_of(dtype=torch.float32), torch.zeros(TOKENS, COLUMNS)),  # products in fp32 have other kernels
        (linear_of(rows=257), torch.zeros(TOKENS, COLUMNS).bfloat16()),  # fewer columns than rows
        (linear_of(columns=260), torch.zeros(TOKENS, 260).bfloat16()),  # parts would start off a vector
        (linear_of(), torch.zeros(2, TOKENS, COLUMNS).bfloat16()),  # a batch dim
    ],
)
def test_leaves_other_products_whole(linear, x):
    assert split_products(traced(linear, x)) is None


@pytest.mark.parametrize(("rows", "small"), [(ROWS, ROWS * COLUMNS * 2), (COLUMNS, 2**20)])
def test_large_weights_and_square_ones_have_two_parts(monkeypatch, rows, small):
    monkeypatch.setattr(module, "SMALL_BYTES", small)
    linear, x = linear_of(rows), torch.randn(TOKENS, COLUMNS).bfloat16()
    gm = traced(linear, x)
    with OnCpu() as mode:
        split_products(gm)(*arguments(gm, linear, x))
    assert mode.parts == [2]
