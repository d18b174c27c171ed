"""Adapters of peft and hooks of accelerate, before and after the first call."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.transformers_models.test_changes import check, logits, small
from tests.transformers_models.whole import OPTIONS, close, fallbacks, replays, tiny

peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")


def lora(*targets: str) -> Any:
    return peft.LoraConfig(target_modules=list(targets), r=4, init_lora_weights=False)


def with_adapter(model: Any) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(model, lora("q_proj", "up_proj")).eval()


def test_an_adapter_loaded_after_the_first_call_is_followed_through_all_its_life() -> None:
    model, eager = small()
    check(model, eager)
    pair = [with_adapter(m) for m in (model, eager)]
    check(*pair)
    on, seen = logits(pair[1]), [logits(eager)]

    def changed() -> None:
        check(*pair, 1)
        seen.append(logits(pair[1]))
        assert float((seen[-1] - seen[-2]).abs().max()) > 1e-3

    with pair[0].disable_adapter(), pair[1].disable_adapter():
        changed()
    changed()
    for p in pair:
        torch.manual_seed(6)
        p.add_adapter("other", lora("k_proj"))
        p.set_adapter("other")
        p.eval()
    changed()
    for p in pair:
        p.set_adapter("default")
    changed()
    for p in pair:
        p.merge_adapter()
    check(*pair)
    close(logits(pair[1]), on, 1e-4)
    for p in pair:
        p.unmerge_adapter()
        with torch.no_grad():
            for name, weight in p.named_parameters():
                if "lora_B.default" in name:
                    weight.mul_(2)
    changed()
    unloaded = [p.merge_and_unload() for p in pair]
    check(*unloaded)
    report = fgc.report(model)
    assert set(report.fallbacks) <= {Reason.CHANGED, Reason.WEIGHTS_MOVED}
    assert replays(model) >= 10


def test_a_model_with_an_adapter_is_compiled_by_its_body() -> None:
    model = with_adapter(tiny("Llama", num_hidden_layers=1))
    eager = copy.deepcopy(model)
    assert fgc.compile(model, **OPTIONS) is model
    check(model, eager)
    with model.disable_adapter(), eager.disable_adapter():
        check(model, eager)
    assert replays(model) == 4
    assert set(fallbacks(model)) <= {Reason.CHANGED}
    assert fgc.warmup(model).ready


def test_embeddings_that_were_marked_for_training_replay_once_it_is_over() -> None:
    model = with_adapter(tiny("Llama", num_hidden_layers=1))
    model.enable_input_require_grads()  # as Trainer does for gradient checkpointing, and nothing undoes
    eager = copy.deepcopy(model)
    fgc.compile(model, **OPTIONS)
    check(model, eager, 1, 2)
    if torch.__version__ < "2.13":  # Dynamo did not trace it
        assert set(fallbacks(model)) == {Reason.NOT_TRACED} and not replays(model)
    else:
        assert replays(model) == 2 and not fallbacks(model)


def offloaded(model: Any, folder: Path) -> None:
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def on_disk(model: Any, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def dispatched(model: Any, folder: Path) -> None:
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("moved", [offloaded, on_disk, dispatched])
@pytest.mark.parametrize("first", [True, False])
def test_weights_that_are_moved_at_each_call_are_refused_by_name(moved: Any, first: bool, tmp_path: Path) -> None:
    model = tiny("Llama", num_hidden_layers=1)
    eager = copy.deepcopy(model)
    if first:
        moved(model, tmp_path)
    fgc.compile(model, **OPTIONS)
    if not first:
        check(model, eager)
        moved(model, tmp_path)
    launched = replays(model)
    check(model, eager)
    assert fallbacks(model)[Reason.OFFLOADED] == 2
    assert "AlignDevicesHook on" in fgc.report(model).details[Reason.OFFLOADED]
    if moved is offloaded:
        accelerate.hooks.remove_hook_from_submodules(model)
        check(model, eager)
        assert replays(model) == launched + 2


def test_a_hook_of_accelerate_on_the_body_runs_around_it() -> None:
    class Doubling(accelerate.hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return type(output)(last_hidden_state=output[0] * 2)

    model, eager = small()
    check(model, eager)
    for m in (model, eager):
        accelerate.hooks.add_hook_to_module(m.model, Doubling())
    check(model, eager)
    assert replays(model) == 4
    for m in (model, eager):
        accelerate.hooks.remove_hook_from_module(m.model)
    check(model, eager)
    assert replays(model) == 6


def test_a_device_map_of_one_device_is_captured(tmp_path: Path) -> None:
    import transformers

    eager = tiny("Llama", num_hidden_layers=1)
    eager.save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map="cpu").eval()
    fgc.compile(model, **OPTIONS)
    check(model, eager)
    assert replays(model) == 2
