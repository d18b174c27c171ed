"""The tests of a module here share compiled bodies: Dynamo is cleaned before the first, not before each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fullgraph_compile.staging import Poison
from tests.paged.engine import compiled, model


@pytest.fixture(autouse=True)
def clean_dynamo() -> None:
    """Nothing is cleaned between tests: Dynamo, whose guards a shared body asks, is cleaned before the first."""
    torch.set_grad_enabled(True)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def shared() -> Callable[..., nn.Module]:
    """One compiled body of each model, for tests that leave it as it is; each brings a cache, and so its captures."""
    torch._dynamo.reset()
    made: dict[str, nn.Module] = {}

    def body(name: str, poison: Poison | None = None) -> nn.Module:
        if name not in made:
            made[name] = compiled(model(name))
        for graph in made[name].forward.graphs():
            graph.runner.poison = poison
        return made[name]

    return body
