"""Weights that get other memory are noticed, whatever way they get it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fullgraph_compile import weight_memory
from fullgraph_compile.weight_memory import WeightMemory


def weights() -> list[Tensor]:
    shared = torch.empty(32)
    return [nn.Parameter(torch.empty(16)), nn.Parameter(shared[:8]), nn.Parameter(shared[8:16]), torch.empty(3)]


CHANGES: dict[str, Callable[[Tensor], None]] = {
    "other data": lambda t: setattr(t, "data", torch.empty(16)),
    "other rows of the same storage": lambda t: setattr(t, "data", t.data.view(-1)[1:]),
    "a storage that was resized": lambda t: t.untyped_storage().resize_(1 << 20),
    "a storage that was set free": lambda t: t.untyped_storage().resize_(0),
    "a swapped tensor": lambda t: torch.utils.swap_tensors(t, nn.Parameter(torch.empty(16))),
}


@pytest.fixture(params=["words", "addresses"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "addresses":
        monkeypatch.setattr(weight_memory, "_LAYOUT", None)
    return request.param


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1])
def test_other_memory_is_noticed(way: str, change: str, which: int) -> None:
    tensors = weights()
    known = WeightMemory(tensors)
    assert known.same(tensors) and known.same(tuple(tensors))
    before = tensors[which].data_ptr()
    with torch.no_grad():
        CHANGES[change](tensors[which])
    assert tensors[which].data_ptr() != before
    assert not known.same(tensors)
    assert not known.same(tensors)


def test_memory_that_comes_back_is_the_same(way: str) -> None:
    tensors = weights()
    known = WeightMemory(tensors)
    first = tensors[0].data
    tensors[0].data = torch.empty(16)
    assert not known.same(tensors)
    tensors[0].data = first
    assert known.same(tensors)
    tensors[0].data = first[:4]
    assert known.same(tensors), "its address is what it was"


def test_other_tensors_in_the_same_memory_are_the_same_and_looked_at_anew(way: str) -> None:
    tensors = weights()
    known = WeightMemory(tensors)
    others = [t.detach() for t in tensors]
    assert known.same(others)
    others[3].data = torch.empty(3)
    assert not known.same(others)
    assert known.same(tensors)
    assert not known.same(tensors[:-1])


def test_values_that_change_in_place_are_not_other_memory(way: str) -> None:
    tensors = weights()
    known = WeightMemory(tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(2.0)
    assert known.same(tensors)


def test_memory_of_a_weight_is_not_kept() -> None:
    tensors = weights()
    known = WeightMemory(tensors)
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensors[0].untyped_storage())
    tensors[0].data = torch.empty(16)
    gc.collect()
    assert storage.expired()
    assert not known.same(tensors)


def test_tensors_without_memory_of_their_own_are_asked_for_their_addresses() -> None:
    class Kind(Tensor):
        pass

    for odd in (torch.empty(0), torch.empty(3).as_subclass(Kind)):
        tensors = [torch.empty(4), odd]
        known = WeightMemory(tensors)
        assert known._inside is None
        assert known.same(tensors)
        tensors[0].data = torch.empty(4)
        assert not known.same(tensors)


def test_addresses_are_read_as_words_on_this_torch() -> None:
    assert weight_memory._LAYOUT is not None


def test_an_asking_calls_nothing_for_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tuple(weights() * 20)
    known = WeightMemory(tensors)

    def never(_: object) -> list[int]:
        raise AssertionError("asked for each address")

    monkeypatch.setattr(weight_memory, "addresses", never)
    assert known.same(tensors)
