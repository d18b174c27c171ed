"""Which linears become one, which stay apart, and that the result is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import fullgraph_compile.ops as ops
from fullgraph_compile.passes.check_row_independence import check_row_independence
from fullgraph_compile.passes.common import op_name, value_of
from fullgraph_compile.passes.fuse_projections import Fusion, Stack, fuse_projections
from fullgraph_compile.passes.split_pieces import split_pieces
from tests.tracing import TOKENS, trace

HIDDEN = 8


def linears(gm: GraphModule) -> int:
    return sum(op_name(n) == "linear" for n in gm.graph.nodes)


def fused(module: nn.Module, *, backed: bool = False, admit: Callable[[Sequence[Stack]], bool] = bool) -> Fusion:
    """Trace a module on ``[tokens, 8]`` and fuse; what comes out is checked against what went in."""
    gm, token = trace(module.requires_grad_(False), torch.randn(TOKENS, HIDDEN), backed=backed)
    before = [(n.name, n.target, n.args) for n in gm.graph.nodes]
    result = fuse_projections(gm, admit)
    assert [(n.name, n.target, n.args) for n in gm.graph.nodes] == before, "the graph given was changed"
    result.body.graph.lint()
    check_values(gm, result)
    assert not check_row_independence(result.body, token).refusals
    return result


def check_values(gm: GraphModule, result: Fusion, size: int = 5) -> None:
    """The fused body computes what the body did, with the strides that its nodes say."""
    args: list[Any] = [
        x if isinstance(x, nn.Parameter) else torch.randn(size, HIDDEN) if isinstance(x, Tensor) else size
        for x in gm.meta["example_inputs"]
    ]
    with torch.no_grad():
        want = gm(*args)
        for stack in result.stacks:
            args[stack[0]] = torch.cat([args[i] for i in stack])
            for i in stack[1:]:
                args[i] = None  # nothing reads it
        got = result.body(*args)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        Strides(result.body).run(*args)


class Strides(torch.fx.Interpreter):
    """Runs a graph; each tensor's strides, and what it is a view of, must be those of the node's fake value."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result, fake = super().run_node(n), value_of(n)
        if n.op.startswith("call") and isinstance(fake, Tensor) and isinstance(result, Tensor):
            # The token count may be a factor of a stride, where a batch dim of 1 is in front of it.
            known = [(a, b) for a, b in zip(result.stride(), fake.stride(), strict=True) if isinstance(b, int)]
            assert all(a == b for a, b in known), f"{n.name}: {result.stride()}, {fake.stride()}"
            first = n.args[0]
            if isinstance(first, torch.fx.Node) and isinstance(self.env[first], Tensor):
                assert same_memory(result, self.env[first]) == same_memory(fake, value_of(first)), n.name
        return result


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


class Block(nn.Module):
    """Query, key, value, attention, output, gate and up."""

    def __init__(self, bias: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(HIDDEN, 16), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(-1, self.heads, HIDDEN // self.heads) for p in (self.q, self.k, self.v))
        q, k = q.transpose(0, 1).cos().transpose(0, 1), k * 2
        a = ops.attention(q, k, v, None, None, 0.5, -1, 0, 0.0, -1)
        x = x + self.o(a.reshape(-1, HIDDEN))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Blocks(nn.Module):
    def __init__(self, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(bias) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("backed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_block_has_four_linears_in_place_of_seven(bias: bool, backed: bool) -> None:
    result = fused(Blocks(1, bias), backed=backed)
    assert linears(result.body) == 4
    # q, k, v and gate, up: their weights, and where they have them their biases.
    assert sorted(map(len, result.stacks)) == ([2, 2, 3, 3] if bias else [2, 2, 3])


def test_fused_layers_still_have_three_kinds_of_piece() -> None:
    result = fused(Blocks(5, bias=True))
    pieces = split_pieces(result.body)
    assert len(pieces.kinds) == 3
    assert [linears(kind) for kind in pieces.kinds] == [1, 4, 3]
    assert not pieces.interpret


def test_what_may_not_be_stacked_stays_apart() -> None:
    asked: list[Sequence[Stack]] = []

    def not_three(stacks: Sequence[Stack]) -> bool:
        asked.append(stacks)
        return len(stacks[0]) != 3

    result = fused(Blocks(1, bias=True), admit=not_three)
    assert linears(result.body) == 6
    assert [len(s) for s in result.stacks] == [2, 2]
    assert [[len(s) for s in stacks] for stacks in asked] == [[3, 3], [2, 2]]


# -- modules of which nothing may be fused ---------------------------------------------------------------------------


class Pair(nn.Module):
    """Two linears that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sigmoid() * self.b(x)


class InputWritten(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        a = self.a(x).sigmoid()
        x.mul_(2)
        return a * self.b(x)


class InputViewWritten(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        a = self.a(x).sigmoid()
        x[:, 0].add_(1)
        return a * self.b(x)


class ResultWritten(Pair):
    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        a.sigmoid_()
        return a * self.b(x)


class ResultReturned(Pair):
    def forward(self, x: Tensor) -> Any:
        a, b = self.a(x), self.b(x)
        return a.view(-1, 2, 4), a.sigmoid() * b


class WeightReadTwice(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sigmoid() * self.b(x) + self.a.weight[0]


class UsedTwice(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sigmoid() * self.a(x + 0)


class SameTwice(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sigmoid() * self.a(x)


class OtherInput(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sigmoid() * self.b(x.cos())


class ComputedWeight(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight.double().float()) * self.b(x)


class OneBias(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(HIDDEN, HIDDEN, bias=False)


class OtherOwner(nn.Module):
    """As adapters are: each in a projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
        self.b = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sigmoid() * self.b(x)


class OtherPiece(Pair):
    def forward(self, x: Tensor) -> Tensor:
        heads = self.a(x).view(-1, 2, 4)
        rows = ops.attention(heads, heads, heads, None, None, 0.5, -1, 0, 0.0, -1)
        return rows.reshape(-1, HIDDEN) * self.b(x)


class NeedsContiguous(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).view(-1).view(-1, HIDDEN) * self.b(x)


NOT_FUSED = [
    InputWritten, InputViewWritten, ResultWritten, ResultReturned, WeightReadTwice, UsedTwice, SameTwice, OtherInput,
    ComputedWeight, OneBias, OtherOwner, OtherPiece, NeedsContiguous,
]  # fmt: skip


@pytest.mark.parametrize("kind", NOT_FUSED)
def test_linears_that_differ_in_more_than_their_weights_stay_apart(kind: type[nn.Module]) -> None:
    module = kind()
    gm, _ = trace(module, torch.randn(TOKENS, HIDDEN))
    result = fuse_projections(gm, bool)
    assert not result.stacks
    assert linears(result.body) == 2


def test_their_good_twin_is_fused() -> None:
    assert linears(fused(Pair()).body) == 1


def test_functional_linears_of_one_module_are_fused() -> None:
    class Functional(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.a.weight, bias=self.a.bias).sigmoid() * F.linear(x, self.b.weight, self.b.bias)

    assert linears(fused(Functional()).body) == 1


def test_a_view_with_the_strides_that_it_had_is_a_view_of_other_memory() -> None:
    class FirstRow(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)[0] * self.b(x)

    gm, _ = trace(FirstRow(), torch.randn(TOKENS, HIDDEN))
    result = fuse_projections(gm, bool)
    assert linears(result.body) == 1
    check_values(gm, result)


def test_a_slice_that_crosses_an_attention_call_has_its_own_strides() -> None:
    class Gated(Block):
        """The gate is computed in front of attention, and read after it."""

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(HIDDEN, HIDDEN, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v, gate = (p(x).view(-1, 2, 4) for p in (self.q, self.k, self.v, self.gate))
            return self.o((ops.attention(q, k, v, None, None, 0.5, -1, 0, 0.0, -1) * gate).reshape(-1, HIDDEN))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Gated(), Gated()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    result = fused(Twice())
    assert linears(result.body) == 4
    pieces = split_pieces(result.body)
    crossing = [e for e in pieces.examples[1] if isinstance(e, Tensor) and e.dim() == 3]
    assert 4 * HIDDEN in [e.stride(0) for e in crossing]
