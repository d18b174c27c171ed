"""What changes between the calls of a model is noticed in the same call: right, or not captured with its reason."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from fullgraph_compile.forms import Forms
from fullgraph_compile.integrations import hf_back
from fullgraph_compile.integrations.plain import ModuleChanged
from fullgraph_compile.tracing import Tracer
from tests.transformers_models.whole import call, close, fallbacks, padded, pair, replays, rows_equal

Undo = Callable[[], Any]


def logits(model: nn.Module, seed: int = 1) -> Tensor:
    inputs = padded([3, 7, 4], seed=seed)
    return call(model, **inputs, use_cache=False).logits[inputs["attention_mask"].bool()]


def check(model: nn.Module, eager: nn.Module, *seeds: int) -> None:
    for seed in seeds or (1, 2):
        close(logits(model, seed), logits(eager, seed))


def small() -> tuple[Any, Any]:
    return pair("Llama", num_hidden_layers=1)


def norm_eps(m: Any) -> Undo:
    m.model.norm.variance_epsilon, before = 0.5, m.model.norm.variance_epsilon
    return lambda: setattr(m.model.norm, "variance_epsilon", before)


def one_forward(m: Any) -> Undo:
    mlp = m.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, mlp)
    return lambda: delattr(mlp, "forward")


def pre_hook_with_kwargs(m: Any) -> Undo:
    def twice(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}

    return m.model.layers[0].self_attn.register_forward_pre_hook(twice, with_kwargs=True).remove


def hook_of_the_body(m: Any) -> Undo:
    return m.model.register_forward_hook(lambda module, args, out: type(out)(last_hidden_state=out[0] + 1)).remove


@pytest.mark.parametrize("change", [norm_eps, one_forward, pre_hook_with_kwargs, hook_of_the_body])
def test_a_change_that_comes_and_goes_is_followed_by_graphs(change: Callable[[Any], Undo]) -> None:
    model, eager = small()
    before = logits(model)
    for _ in range(2):
        undo = [change(m) for m in (model, eager)]
        check(model, eager)
        assert float((logits(eager) - before).abs().max()) > 1e-2
        for u in undo:
            u()
        check(model, eager)
    report = fgc.report(model)
    assert report.compiles <= 2  # of the model with the change, and without it
    assert set(report.fallbacks) <= {Reason.CHANGED}


@pytest.mark.parametrize("name", ["forward", "act_fn"])
def test_a_class_that_is_patched_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.activations import SiLUActivation
    from transformers.models.llama.modeling_llama import LlamaMLP

    owner: Any = LlamaMLP if name == "forward" else SiLUActivation
    model, eager = small()
    before, own = logits(model), owner.forward
    with monkeypatch.context() as patch:
        patch.setattr(owner, "forward", lambda self, x: own(self, x) * 2)
        check(model, eager)
        assert float((logits(eager) - before).abs().max()) > 1e-2
    check(model, eager)
    assert fgc.report(model).compiles == 2


def test_a_launch_whose_result_is_thrown_away_is_counted_apart() -> None:
    model, eager = small()
    check(model, eager)
    for m in (model, eager):
        m.model.norm.variance_epsilon = 0.5
    check(model, eager)
    report = fgc.report(model)
    assert (replays(model), report.dropped.total(), report.fallbacks[Reason.CHANGED]) == (4, 1, 1)
    assert sum(bucket * n for bucket, n in report.replays.items()) - report.padding.total() == 4 * 14
    assert "1 more launch" in str(report)


def test_a_launch_whose_result_cannot_be_given_back_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = small()
    check(model, eager)
    monkeypatch.setattr(hf_back, "_ROWS", frozenset())
    check(model, eager, 1)
    report = fgc.report(model)
    assert (replays(model), report.dropped.total(), report.fallbacks[Reason.ARGUMENTS]) == (2, 1, 1)


def test_what_was_learned_of_a_model_is_learned_anew_after_a_change() -> None:
    """transformers masks by the config, the op by the attribute: they now say different things."""
    model, eager = small()
    check(model, eager)
    for m in (model, eager):
        m.model.layers[0].self_attn.is_causal = False
    check(model, eager)
    for m in (model, eager):
        m.model.layers[0].self_attn.is_causal = True
    check(model, eager, *range(6))
    assert replays(model) > 2


def test_a_change_after_which_the_model_fails_fails_as_the_model_does_in_every_form() -> None:
    """Both forms that were traced are launched in vain, and nothing is learned of the model as it is now."""
    model, eager = small()
    inputs = padded([3, 7, 4], seed=1)
    real = inputs["attention_mask"].bool()

    def same(use_cache: bool) -> None:
        for m in (model, eager):
            m.config.use_cache = use_cache
        got, want = call(model, **inputs), call(eager, **inputs)
        assert (got.past_key_values is None) == (want.past_key_values is None) == (not use_cache)
        close(got.logits[real], want.logits[real])

    for _ in range(2):
        for use_cache in (True, False, True):
            same(use_cache)
        for m in (model, eager):
            m.config.return_dict = False  # of the body, whose result the model then cannot take apart
            with pytest.raises(AttributeError, match="last_hidden_state"):
                call(m, **inputs)
            m.config.return_dict = True
        same(True)


def test_a_module_that_has_changed_each_time_that_a_call_is_made_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = small()
    check(model, eager)

    def changed(*args: Any) -> Any:
        raise ModuleChanged

    monkeypatch.setattr(Forms, "serve", changed)
    check(model, eager, 1)
    assert fallbacks(model) == {Reason.NOT_LASTING: 1}


def test_a_part_in_training_mode_is_followed() -> None:
    model, eager = small()
    for m in (model, eager):
        m.model.layers[0].mlp.act_fn = nn.Dropout(0.5).eval()
    check(model, eager)
    model.model.layers[0].mlp.act_fn.train()
    once, again = logits(model), logits(model)
    assert float((once - again).abs().max()) > 1e-2  # dropped at random, each time anew
    model.model.layers[0].mlp.act_fn.eval()
    check(model, eager)


# -- hooks that Dynamo cannot follow -----------------------------------------------------------------------------------


def test_a_hook_that_keeps_what_it_sees_sees_every_call_as_it_is() -> None:
    model, eager = small()
    check(model, eager)
    kept: list[Tensor] = []
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: kept.append(out))
    for seed in range(30):
        before = len(kept)
        check(model, eager, seed)
        assert len(kept) > before
        assert kept[-1].shape == (3, 7, 32)
    report = fgc.report(model)
    assert report.fallbacks[Reason.NOT_LASTING] >= 24
    assert report.compiles <= 7
    handle.remove()
    check(model, eager, *range(40))
    assert replays(model) >= 9


def test_what_does_not_trace_is_not_tried_at_each_call(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model, eager = small()
    check(model, eager)
    launched, tried, trace = replays(model), [], Tracer.trace
    monkeypatch.setattr(Tracer, "trace", lambda *args: (tried.append(args), trace(*args))[1])
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: print("seen"))
    for seed in range(20):
        capsys.readouterr()
        logits(model, seed)
        assert capsys.readouterr().out.count("seen") >= 1
    assert fallbacks(model) == {Reason.CHANGED: 1, Reason.NOT_TRACED: 20}
    assert len(tried) <= 6
    assert replays(model) == launched
    handle.remove()
    check(model, eager)
    assert replays(model) == launched + 2


def test_a_hook_on_all_modules_is_called() -> None:
    model, eager = small()
    check(model, eager)

    def halved(module: Any, args: Any, out: Any) -> Any:
        return out / 2 if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(halved)
    try:
        check(model, eager)
    finally:
        handle.remove()
    check(model, eager)
    assert fallbacks(model) == {Reason.INTERPOSED: 2}
    assert replays(model) == 4


def fake_tensors(model: nn.Module) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return call(model, input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False).logits.shape


def flops(model: nn.Module) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        logits(model)
    return counter.get_total_flops()


def mapped(model: nn.Module) -> Tensor:
    ids = torch.arange(2, 14).reshape(3, 1, 4)
    with torch.no_grad():
        return torch.func.vmap(lambda x: model(input_ids=x, use_cache=False).logits)(ids)


@pytest.mark.parametrize("seen", [flops, fake_tensors, mapped])
@pytest.mark.parametrize("first", [True, False])
def test_what_sees_each_operation_sees_them(seen: Callable[[Any], Any], first: bool) -> None:
    model, eager = small()
    if not first:
        check(model, eager)
    got, want = seen(model), seen(eager)
    if isinstance(got, Tensor):
        close(got, want)
    else:
        assert got == want
    check(model, eager)
    assert fallbacks(model) == {Reason.INTERPOSED: 1}
    assert fgc.report(model).compiles == 1


def test_inside_of_a_batch_what_sees_each_operation_is_an_error_with_its_name() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, _ = small()
    batch, ids = fgc.PrefillBatch([3, 4], device="cpu"), torch.arange(2, 9)[None]
    with FlopCounterMode(display=False), batch, pytest.raises(fgc.FallbackError, match="FlopCounterMode"):
        call(model, input_ids=ids, use_cache=False)


def test_a_tensor_of_another_kind_stays_one() -> None:
    class Named(Tensor):
        pass

    model, eager = small()
    ids = padded([3, 7])["input_ids"].as_subclass(Named)
    for m in (model, eager):
        assert type(call(m, input_ids=ids, use_cache=False).logits) is Named
    assert fallbacks(model) == {Reason.ARGUMENTS: 1}


def test_a_model_that_passes_by_its_body_says_so() -> None:
    import transformers

    class Direct(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **more: Any) -> Tensor:
            model = self.model
            x = model.embed_tokens(input_ids)
            for layer in model.layers:
                positions = torch.arange(x.shape[1])[None]
                x = layer(x, position_embeddings=model.rotary_emb(x, positions), attention_mask=None)
            return self.lm_head(model.norm(x))

    base, eager = small()
    fgc.close(base)
    model = Direct(base.config).eval()
    model.load_state_dict(base.state_dict())
    fgc.compile(model, buckets=[16], graphs="tape", compiler="eager")
    ids = padded([7])["input_ids"]
    close(call(model, input_ids=ids), call(eager, input_ids=ids).logits)
    assert fallbacks(model) == {Reason.PASSED_BY: 1}
    with fgc.PrefillBatch([3, 4], device="cpu"), pytest.raises(fgc.FallbackError, match=r"LlamaModel\.forward"):
        call(model, input_ids=ids)
    rows = call(model.model, **padded([3, 7]), use_cache=False)[0]
    rows_equal(rows, call(eager.model, **padded([3, 7]), use_cache=False)[0], padded([3, 7])["attention_mask"])
    assert replays(model) == 1
    fgc.close(model)
    assert "forward" not in vars(model)
