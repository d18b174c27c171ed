"""Dynamo is cleaned before each module here, not before each test: the tests of a module share compiled bodies, which ask
Dynamo's guards whether they still hold."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def clean_dynamo_once() -> None:
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def clean_dynamo(clean_dynamo_once: None) -> None:
    torch.manual_seed(0)
