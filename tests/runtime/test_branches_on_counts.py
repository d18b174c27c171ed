"""A model whose code asks for the token count: each request of a batch gets its own branch, or the call is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.dispatch import FallbackError
from tests.models import T2, tokens
from tests.runtime.bodies import both_ways, compiled, equal, run


class Branching(T2):
    def __init__(self, long: Callable[[int], bool]) -> None:
        super().__init__(layers=1)
        self.long = long

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = super().forward(input_ids, position_ids)
        return hidden * 2 if self.long(input_ids.shape[1]) else hidden


def _packed(body: Callable[..., Tensor], lengths: list[int]) -> Tensor:
    ids = tokens(sum(lengths))[None]
    with torch.no_grad(), fgc.PrefillBatch(lengths) as batch:
        return body(input_ids=ids, position_ids=batch.position_ids[None])


def _apart(eager: Callable[..., Tensor], lengths: list[int]) -> Tensor:
    rows = tokens(sum(lengths)).split(lengths)
    with torch.no_grad():
        return torch.cat([eager(ids[None], torch.arange(len(ids))[None]) for ids in rows], 1)


@both_ways
def test_requests_that_take_another_branch_than_their_batch_are_an_error(way: str) -> None:
    module = Branching(lambda count: count >= 10).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n in (5, 6, 12):
        equal(run(body, n), run(eager, n))
    equal(_packed(body, [3, 1, 4]), _apart(eager, [3, 1, 4]))
    for lengths, wrong in (([5, 7], 5), ([11, 1], 1), ([1] * 12, 1)):
        with pytest.raises(FallbackError, match=f"another branch for {wrong} tokens than for the 12 of the call"):
            _packed(body, lengths)
    equal(_packed(body, [3, 1, 4]), _apart(eager, [3, 1, 4]))
    equal(run(body, 12), run(eager, 12))


@both_ways
def test_a_question_about_a_single_token_alone_keeps_no_request_out(way: str) -> None:
    module = Branching(lambda count: count > 1 and False).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n in (5, 6):
        equal(run(body, n), run(eager, n))
    equal(_packed(body, [3, 1, 4]), _apart(eager, [3, 1, 4]))
