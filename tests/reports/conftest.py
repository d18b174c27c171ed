"""The tests of a module share compiled bodies, which ask Dynamo's guards whether they still hold: so Dynamo is cleaned
before each module here, not before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.reports.cases import Watched, known_as


@pytest.fixture(autouse=True, scope="module")
def clean_start() -> Iterator[None]:
    torch._dynamo.reset()
    with known_as("watched", Watched):
        yield


@pytest.fixture(autouse=True)
def clean_dynamo(clean_start: None) -> None:
    torch.manual_seed(0)
