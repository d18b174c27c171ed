"""What marks tensors for a gradient is left out of a graph, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fullgraph_compile.passes.check_row_independence import check_row_independence
from fullgraph_compile.passes.drop_grad import drop_grad
from tests.tracing import TOKENS, trace


def marked(x: Tensor) -> Tensor:
    y = x * 2
    y.requires_grad_(True)
    return y + y.sin()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo does not trace it")
def test_marks_are_left_out_and_the_rest_is_what_it_was() -> None:
    x = torch.randn(TOKENS, 4)
    with torch.no_grad():
        gm, token = trace(marked, x)
    assert check_row_independence(gm, token).refusals
    drop_grad(gm)
    gm.graph.lint()
    assert not [n for n in gm.graph.nodes if "grad" in str(n.target)]
    assert not check_row_independence(gm, token).refusals
    inputs = [x if isinstance(e, Tensor) else TOKENS for e in gm.meta["example_inputs"]]
    (got,) = gm(*inputs)
    assert torch.equal(got, x * 2 + (x * 2).sin()) and not got.requires_grad


def test_a_graph_without_marks_is_left_as_it_is() -> None:
    gm, _ = trace(lambda x: x.detach() * 2, torch.randn(TOKENS, 4))
    before = [(n.op, n.name) for n in gm.graph.nodes]
    assert [(n.op, n.name) for n in drop_grad(gm).graph.nodes] == before
