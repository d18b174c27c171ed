"""Long products of few tokens in parts: which are split, and that the result is that of the whole product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace
from torch.overrides import TorchFunctionMode

from fullgraph_compile.passes import split_products as module
from fullgraph_compile.passes.split_products import split_products

ROWS, COLUMNS, TOKENS = 8, 256, 5


class OnCpu(TorchFunctionMode):
    """``bmm`` with a result of another dtype, which torch has on GPUs only; counts the calls."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.bmm and "out_dtype" in kwargs:
            self.calls += 1
            return torch.bmm(args[0].to(kwargs["out_dtype"]), args[1].to(kwargs["out_dtype"]))
        return func(*args, **kwargs)


def piece(x: Tensor, weight: Tensor) -> GraphModule:
    """The product and a residual, as a piece of a body has them."""

    def body(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor]:
        return (torch._C._nn.linear(x, weight) + residual,)

    gm = symbolic_trace(body)
    values = dict(zip(["x", "weight", "residual"], (x, weight, x[..., : weight.shape[0]]), strict=True))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["example_value"] = values[node.name]
        elif node.target is torch._C._nn.linear:
            node.meta["example_value"] = torch.nn.functional.linear(x, weight)
    return gm


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 0)


@pytest.mark.parametrize("shape", [(TOKENS, COLUMNS), (1, TOKENS, COLUMNS), (1, 1, TOKENS, COLUMNS)])
def test_equals_the_whole_product(shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).bfloat16(), torch.randn(ROWS, COLUMNS).bfloat16()
    gm = piece(x, weight)
    split = split_products(gm)
    residual = x[..., :ROWS]
    with OnCpu() as mode:
        (got,) = split(x, weight, residual)
    assert mode.calls == 1
    want = (x.double() @ weight.double().t()).bfloat16() + residual
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    # Rounded once from fp32: off by at most the last bit of the product.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-6)
    assert not any(n.target is torch.bmm for n in gm.graph.nodes), "the piece that was given is left as it was"


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(TOKENS, 256), torch.zeros(8, 256)),  # fp32: products in fp32 have other kernels
        (torch.zeros(TOKENS, 256).bfloat16(), torch.zeros(129, 256).bfloat16()),  # not twice as many columns as rows
        (torch.zeros(TOKENS, 250).bfloat16(), torch.zeros(8, 250).bfloat16()),  # parts would start off a vector
        (torch.zeros(2, TOKENS, 256).bfloat16(), torch.zeros(8, 256).bfloat16()),  # a batch dim
        (torch.zeros(TOKENS, 256).bfloat16(), torch.zeros(256, 8).bfloat16().t()),  # columns are not together
    ],
)
def test_leaves_other_products_whole(x, weight):
    assert split_products(piece(x, weight)) is None


def test_leaves_small_weights_whole(monkeypatch):
    x, weight = torch.zeros(TOKENS, COLUMNS).bfloat16(), torch.zeros(ROWS, COLUMNS).bfloat16()
    assert split_products(piece(x, weight)) is not None
    monkeypatch.setattr(module, "LEAST_BYTES", ROWS * COLUMNS * 2 + 1)
    assert split_products(piece(x, weight)) is None
