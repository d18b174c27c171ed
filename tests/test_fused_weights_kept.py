"""Parameters in shared storages: still the module's own, never stale, never doubled, given back by ``close``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.fused import PROJECTIONS, held, llama, prepared, shared, stacks
from tests.models import tiny, tiny_causal_lm
from tests.runtime.bodies import check, check_replayed, first, replays, run, runners

# -- still the module's own ------------------------------------------------------------------------------------------


def test_nothing_of_the_module_changes_but_where_its_weights_lie() -> None:
    module = tiny("Qwen2")
    before = copy.deepcopy(module)
    parameters = list(module.parameters())
    size = held(module)
    body = prepared(module)
    assert shared(module)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert held(module) == size
    want, got = before.state_dict(), body.state_dict()
    assert list(got) == list(want)
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name])
        assert tensor.is_contiguous()
        assert tensor.stride() == want[name].stride()
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in before.parameters()]


@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_save_pretrained_and_back(tmp_path: Path, shard: str) -> None:
    model = tiny_causal_lm("Llama")
    want = copy.deepcopy(model)
    prepared(model.model)
    assert shared(model)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    again = type(model).from_pretrained(tmp_path).eval()
    for (name, a), b in zip(again.state_dict().items(), want.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    # A loaded module is as good as new: it is fused in its turn.
    check_replayed(prepared(again.model), want.model, 7)
    assert stacks(again.model)


def test_torch_save_and_load(tmp_path: Path) -> None:
    module = llama()
    want = copy.deepcopy(module)
    body = prepared(module)
    torch.save(body.state_dict(), tmp_path / "state.pt")
    other = llama()
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    check(other, want, 7)


def test_tied_heads_and_embeddings_stay_tied() -> None:
    model = tiny_causal_lm("Llama", tie_word_embeddings=True)
    eager = copy.deepcopy(model)
    body = prepared(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert stacks(body)
    for m in (model, eager):
        with torch.no_grad():
            m.lm_head.weight.mul_(1.5)
    check_replayed(body, eager, 7, 12)


def test_training_goes_on_where_inference_stopped() -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = prepared(module)
    for m in (module, eager):
        optimizer = torch.optim.SGD(m.parameters(), 0.05)
        ids = torch.arange(1, 8)[None]
        first(m(input_ids=ids, use_cache=False)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert shared(module)
    check_replayed(body, eager, 7, 12)


# -- never stale -----------------------------------------------------------------------------------------------------


def loaded(m: Any) -> None:
    m.load_state_dict({k: v * 1.25 for k, v in m.state_dict().items()})


def assigned(m: Any) -> None:
    m.load_state_dict({k: v * 1.25 for k, v in m.state_dict().items()}, assign=True)


def in_place(m: Any) -> None:
    with torch.no_grad():
        m.layers[0].self_attn.k_proj.weight.mul_(-1.25)


def replaced(m: Any) -> None:
    k = m.layers[0].self_attn.k_proj
    k.weight = nn.Parameter(k.weight.detach() * -1.25)


def other_data(m: Any) -> None:
    up = m.layers[0].mlp.up_proj.weight
    up.data = up.data * -1.25


def there_and_back(m: Any) -> None:
    m.double().float()
    in_place(m)


def tied_now(m: Any) -> None:
    m.layers[0].self_attn.v_proj.weight = m.layers[0].self_attn.k_proj.weight


@pytest.mark.parametrize("change", [loaded, assigned, in_place, replaced, other_data, there_and_back, tied_now])
def test_changed_weights_are_followed(change: Callable[[Any], None]) -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = prepared(module)
    stale = first(run(eager, 7))
    change(module), change(eager)
    assert float((first(run(eager, 7)) - stale).abs().max()) > 1e-2
    check(body, eager, 7, 12, 20)
    check_replayed(body, eager, 7, 12, 3)
    assert fgc.report(body).fallbacks[Reason.WEIGHTS_MOVED] <= 2  # buffers first, where they were replaced too
    if change is not tied_now:
        assert {n.split(".")[-2] for n in shared(module)} == PROJECTIONS
        assert held(module) == held(eager)
    # And once more in place, so that no copy of the weights has taken their place.
    in_place(module), in_place(eager)
    check_replayed(body, eager, 7, 12)


def test_weights_replaced_while_there_are_no_graphs() -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = prepared(module)
    fgc.release(body)
    assigned(module), assigned(eager)
    check(body, eager, 7)
    check(body, eager, 7, 12)
    check_replayed(body, eager, 7, 12)


def test_two_forms_of_call_share_the_weights() -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = prepared(module)
    pointers = [p.data_ptr() for p in module.parameters()]
    before = replays(body)
    for m in (body, eager):
        with torch.no_grad():
            m(inputs_embeds=m.embed_tokens(torch.arange(1, 6)[None]), use_cache=False)
    check_replayed(body, eager, 7, 12)
    assert len(runners(body)) == 2
    assert replays(body) >= before + 2
    assert stacks(body) == [2, 2, 3, 3]
    assert [p.data_ptr() for p in module.parameters()] == pointers
    assert not fgc.report(body).fallbacks


# -- undone ----------------------------------------------------------------------------------------------------------


def test_close_gives_each_parameter_its_own_storage_again(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    module = tiny("Qwen2")
    eager = copy.deepcopy(module)
    parameters = list(module.parameters())
    body = prepared(module)
    with pytest.raises(RuntimeError):
        save_model(module, str(tmp_path / "shared"))
    in_place(module), in_place(eager)
    fgc.close(body)
    assert not shared(module)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), eager.parameters(), strict=True))
    save_model(module, str(tmp_path / "apart"))
    check(module, eager, 7)
    check_replayed(prepared(module), eager, 7, 12)


@pytest.mark.parametrize("change", [replaced, other_data])
def test_close_leaves_a_weight_that_was_replaced(change: Callable[[Any], None]) -> None:
    module = llama()
    body = prepared(module)
    change(module)
    layer = module.layers[0]
    mine = (layer.self_attn.k_proj if change is replaced else layer.mlp.up_proj).weight
    at = mine.data_ptr()
    fgc.close(body)
    assert not shared(module)
    assert mine.data_ptr() == at


def test_a_copy_of_the_module_shares_nothing() -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = prepared(module)
    other = copy.deepcopy(body)
    assert not shared(other)
    in_place(other)
    check_replayed(body, eager, 7, 12)
