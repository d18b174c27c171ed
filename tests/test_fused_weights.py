"""Which parameters are put into one storage, and which are left where they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile.fused_weights import FusedWeights
from tests.fused import PROJECTIONS, linears, llama, prepared, shared, stacks
from tests.models import tiny
from tests.runtime.bodies import OPTIONS, check, check_replayed, compiled, ready, runners

# -- which are fused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fused", "left"), [("Llama", [2, 3], 4), ("Qwen2", [2, 3, 3], 4)])
def test_a_decoder_layer_has_four_linears_in_place_of_seven(name: str, fused: list[int], left: int) -> None:
    module = tiny(name, num_hidden_layers=3)
    eager = copy.deepcopy(module)
    body = prepared(module)
    assert stacks(body) == sorted(fused * 3)
    assert linears(body) == left * 3
    assert len(runners(body)[0].program.pieces.kinds) == 3
    check_replayed(body, eager, 1, 5, 7, 12, 16)
    assert {n.split(".")[-2] for n in shared(module)} == PROJECTIONS


def test_a_model_whose_projections_are_one_already_is_left_alone() -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=1, n_head=4)
    module = transformers.GPT2Model(config).eval()
    eager = copy.deepcopy(module)
    body = prepared(module)
    assert not stacks(body)
    assert not shared(module)
    check_replayed(body, eager, 7, 12)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_other_compilers_give_the_same(compiler: str) -> None:
    module = tiny("Qwen2", num_hidden_layers=1)
    eager = copy.deepcopy(module)
    body = compiled("compile", module, compiler=compiler, graphs="tape" if compiler == "aot_eager" else "none")
    check(body, eager, 5, 1, 12)
    assert stacks(body) == [2, 3, 3]


def test_the_option_turns_it_off() -> None:
    module = llama()
    pointers = [p.data_ptr() for p in module.parameters()]
    body = prepared(module, fuse_projections=False)
    assert linears(body) == 7
    assert [p.data_ptr() for p in module.parameters()] == pointers


def test_plain_torch_compile_leaves_the_module_as_it_is() -> None:
    module = llama()
    pointers = [p.data_ptr() for p in module.parameters()]
    body = ready("torch.compile", module, fuse_projections=True)
    assert linears(body) == 7
    assert [p.data_ptr() for p in module.parameters()] == pointers


# -- which are not ---------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Attention and a pair of linears, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(-2, -3) for p in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + a.transpose(-2, -3).flatten(-2)


def call(module: Any, n: int) -> Tensor:
    with torch.no_grad():
        return module(torch.arange(n)[None] % 97, torch.arange(n)[None])


class Subclass(nn.Parameter):
    pass


def tied(m: Plain) -> Any:
    m.other = nn.Linear(16, 16, bias=False)
    m.other.weight = m.v.weight


def one_storage(m: Plain) -> Any:
    m.k.weight.data = m.q.weight.data


def alias_outside(m: Plain) -> Any:
    return m.k.weight.detach()


def view_of_more(m: Plain) -> Any:
    m.k.weight.data = torch.randn(32, 16)[3:19]


def transposed(m: Plain) -> Any:
    m.k.weight.data = torch.randn(16, 16).T


def subclass(m: Plain) -> Any:
    m.k.weight = Subclass(m.k.weight.detach(), requires_grad=True)


def moved_by_a_hook(m: Plain) -> Any:
    m.k._hf_hook = object()


def shared_with_processes(m: Plain) -> Any:
    m.k.weight.share_memory_()


UNFIT = [
    tied, one_storage, alias_outside, view_of_more, transposed, subclass, moved_by_a_hook,
    shared_with_processes,
]  # fmt: skip


@pytest.mark.parametrize("change", UNFIT)
def test_a_weight_that_is_not_plainly_the_modules_own_is_not_moved(change: Callable[[Plain], Any]) -> None:
    module = Plain().eval()
    kept = change(module)
    eager = copy.deepcopy(module)
    places = {n: (p, p.data_ptr()) for n, p in module.named_parameters(remove_duplicate=False)}
    body = fgc.compile(module, **{**OPTIONS, "buckets": [16]})
    for n in (5, 7, 12):
        torch.testing.assert_close(call(body, n), call(eager, n))
    assert not stacks(body)
    now = {n: (p, p.data_ptr()) for n, p in module.named_parameters(remove_duplicate=False)}
    assert all(now[n][0] is p and now[n][1] == at for n, (p, at) in places.items())
    del kept


@pytest.mark.parametrize("frozen", ["", "k", "qkv"])
def test_their_good_twin_is_moved(frozen: str) -> None:
    module = Plain().eval()
    for name in frozen:
        getattr(module, name).weight.requires_grad_(False)
    eager = copy.deepcopy(module)
    body = fgc.compile(module, **{**OPTIONS, "buckets": [16]})
    for n in (5, 7, 12):
        torch.testing.assert_close(call(body, n), call(eager, n))
    assert stacks(body) == [3]
    assert [n for n in "qkv" if not getattr(module, n).weight.requires_grad] == list(frozen)


def test_separate_storages_that_happen_to_be_neighbours_are_not_taken_for_one() -> None:
    whole = torch.randn(8, 4)
    parts = [nn.Parameter(whole[:4]), nn.Parameter(whole[4:])]
    weights = FusedWeights(nn.ParameterList(parts))
    assert weights.whole(parts).data_ptr() == whole.data_ptr()
    # A storage of the first part alone, at the same address: a view over both would leave it.
    short = torch.from_numpy(whole.numpy()[:4])
    parts[0].data = short
    got = weights.whole(parts)
    assert got.data_ptr() != whole.data_ptr()
    assert torch.equal(got, whole)
