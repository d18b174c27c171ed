"""A batch of several requests never lets them see each other, whatever comes after the body: each is served alone, or
the call is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from tests.models import tiny

OPTIONS: dict[str, Any] = {"max_tokens": 32, "graphs": "tape", "compiler": "eager"}
LENGTHS = [4, 1, 7]


def centred(h: Tensor) -> Tensor:
    return h - h.mean(1, keepdim=True)


def against_the_last(h: Tensor) -> Tensor:
    return h - h[:, -1:]


def numbered(h: Tensor) -> Tensor:
    return h * torch.arange(h.shape[1])[None, :, None]


def counted(h: Tensor) -> Tensor:
    return h / h.shape[1]


def shifted(h: Tensor) -> Tensor:
    return h.roll(1, 1)


def summed_up(h: Tensor) -> Tensor:
    return h.cumsum(1)


def among_picked(h: Tensor) -> Tensor:
    picked = h[:, torch.tensor([0, -1])]
    return h[..., :2] * (picked - picked.mean(1, keepdim=True)).mean()


class WithTail(nn.Module):
    def __init__(self, tail: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.tail = tiny("Llama"), tail

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return self.tail(self.body(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0])


def both(tail: Callable[[Tensor], Any], way: str) -> tuple[Any, Any]:
    """An eager model and a compiled one; in ``torch.compile`` with a symbolic token count from the first call on."""
    eager = WithTail(tail).eval()
    torch._dynamo.reset()
    if way == "fgc.compile":
        return eager, fgc.compile(copy.deepcopy(eager), **OPTIONS)
    return eager, torch.compile(copy.deepcopy(eager), backend="full_prefill", options=OPTIONS)


def packed(body: Any, lengths: list[int], *, dynamic: bool = False) -> Any:
    ids = torch.arange(1, sum(lengths) + 1)[None]
    with torch.no_grad(), fgc.PrefillBatch(lengths, device="cpu") as batch:
        positions = batch.position_ids[None]
        if dynamic:
            for x in (ids, positions):
                torch._dynamo.mark_dynamic(x, 1)
        return body(ids, positions)


def alone(eager: Any, lengths: list[int]) -> list[Any]:
    ids = torch.arange(1, sum(lengths) + 1)[None]
    with torch.no_grad():
        return [eager(part, torch.arange(part.shape[1])[None]) for part in ids.split(lengths, dim=1)]


WAYS = ["torch.compile", "fgc.compile"]
TAILS = [centred, against_the_last, numbered, counted, shifted, summed_up, among_picked]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tail", TAILS)
def test_a_tail_that_puts_rows_together_is_run_for_each_request_alone(tail: Any, way: str) -> None:
    eager, body = both(tail, way)
    dynamic = way == "torch.compile"
    packed(body, [5], dynamic=dynamic)
    got = packed(body, LENGTHS, dynamic=dynamic)
    torch.testing.assert_close(got, torch.cat(alone(eager, LENGTHS), dim=1), atol=1e-5, rtol=1e-4)
    # The body is one replay, unless numbers that a model counts itself may be its positions.
    assert sum(fgc.report(body).replays.values()) == 1 + (len(LENGTHS) if tail is numbered else 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_tail_that_pools_all_rows_is_refused_for_several_requests(way: str) -> None:
    eager, body = both(lambda h: h.mean(1), way)
    dynamic = way == "torch.compile"
    got = packed(body, [5], dynamic=dynamic)
    torch.testing.assert_close(got, alone(eager, [5])[0], atol=1e-5, rtol=1e-4)
    with pytest.raises(fgc.FallbackError, match=r"requests apart.*mean over the token dim"):
        packed(body, LENGTHS, dynamic=dynamic)


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_a_tail_picks_are_those_of_the_packed_row(way: str) -> None:
    """A head on chosen rows: none sees another, so nothing is run request by request."""
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    eager, body = both(lambda h: torch.tanh(h[:, last] * 2.0), way)
    dynamic = way == "torch.compile"
    got = packed(body, LENGTHS, dynamic=dynamic)
    eager.tail = lambda h: h[:, -1:]
    torch.testing.assert_close(got, torch.tanh(torch.cat(alone(eager, LENGTHS), 1) * 2), atol=1e-5, rtol=1e-4)
    assert sum(fgc.report(body).replays.values()) == 1


@pytest.mark.parametrize("tail", [centred, against_the_last, numbered, shifted, summed_up, lambda h: h.mean(1)])
def test_a_call_that_is_traced_for_its_size_refuses_several_requests_that_would_meet(tail: Any) -> None:
    eager, body = both(tail, "torch.compile")
    with pytest.raises(ValueError, match="traced for exactly 12 tokens"):
        packed(body, LENGTHS)
    torch.testing.assert_close(packed(body, [12]), alone(eager, [12])[0], atol=1e-5, rtol=1e-4)


def test_a_call_that_is_traced_for_its_size_serves_several_requests_that_do_not_meet() -> None:
    eager, body = both(lambda h: torch.tanh(h) * h.mean(-1, keepdim=True), "torch.compile")
    got = packed(body, LENGTHS)
    torch.testing.assert_close(got, torch.cat(alone(eager, LENGTHS), dim=1), atol=1e-5, rtol=1e-4)
