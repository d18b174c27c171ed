"""Bodies are shared by the tests of a module, and a compiled body asks Dynamo's guards whether it still holds, so Dynamo
is cleaned before each module, not before each test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def clean_dynamo_once() -> None:
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def clean_dynamo(clean_dynamo_once: None) -> None:
    torch.manual_seed(0)
