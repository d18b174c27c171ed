"""Why a model is not captured, in words that a person understands: the kind of thing, its class and its line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.transformers_models import architectures as arch
from tests.transformers_models.whole import OPTIONS, call, close, fallbacks, padded, pair, replays, rows_equal, tiny


def computes_with_its_mask(attention: nn.Module) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, attention_mask: Tensor, **others: Any) -> Any:
        gates = torch.sigmoid(hidden_states @ hidden_states.mT)
        return torch.where(attention_mask[:, 0] == 0, gates, 0.0) @ hidden_states, None

    return forward


def has_keys_of_its_own(attention: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def forward(hidden_states: Tensor, **others: Any) -> Any:
        x = hidden_states.unflatten(-1, (4, 8)).transpose(1, 2)
        more = torch.cat([torch.ones_like(x[:, :, :2]), x], dim=2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, with_all_keys)
        out = attend(attention, x, more, more, None, scaling=0.3)[0]
        return out.flatten(2), None

    return forward


def with_all_keys(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float) -> Any:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    scores = (q @ k.mT * scaling).masked_fill(~seen, -1e9)
    return (scores.softmax(-1) @ v).transpose(1, 2), None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (computes_with_its_mask, "LlamaForCausalLM computes with the mask of its attention calls itself"),
        (has_keys_of_its_own, "LlamaAttention attends from 9 tokens to 11 keys"),
    ],
)
def test_attention_that_no_call_of_the_op_is(change: Callable[[nn.Module], Any], told: str) -> None:
    model, eager = pair("Llama", num_key_value_heads=4, attn_implementation="eager")
    for m in (model, eager):
        for layer in m.model.layers:
            layer.self_attn.forward = change(layer.self_attn)
    inputs = {"input_ids": torch.arange(2, 12).view(2, 5), "use_cache": False}
    close(call(model, **inputs).logits, call(eager, **inputs).logits)
    details = fgc.report(model).details
    assert told in " ".join(details.values()), details
    assert "a small call" not in " ".join(details.values())


def test_a_model_that_cannot_be_asked_with_its_tokens_alone_says_where_it_fails() -> None:
    model, eager = pair("Bert", "Model")
    for m in (model, eager):
        own = m.embeddings.forward
        m.embeddings.forward = lambda own=own, token_type_ids=None, **kw: own(token_type_ids=token_type_ids + 0, **kw)
    inputs = padded([3, 7]) | {"token_type_ids": torch.zeros(2, 7, dtype=torch.long)}
    rows_equal(call(model, **inputs)[0], call(eager, **inputs)[0], inputs["attention_mask"])
    told = fgc.report(model).details[Reason.ARGUMENTS]
    assert told.startswith(
        "BertModel cannot be asked what it means by a call: one of 5 tokens of input_ids alone failed"
    )
    assert "TypeError" in told
    assert "at modeling_bert.py" in told


def test_a_model_that_cannot_make_a_cache_is_served_without_one() -> None:
    model, eager = pair("Llama")

    def no_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("use_cache"):
            raise AttributeError("there is no number of layers")

    for m in (model, eager):
        m.model.layers[0].register_forward_pre_hook(no_cache, with_kwargs=True)
    inputs = padded([3, 7])
    rows_equal(
        call(model, **inputs, use_cache=False).logits,
        call(eager, **inputs, use_cache=False).logits,
        inputs["attention_mask"],
    )
    assert replays(model) == 1


# -- an encoder and a decoder in one -----------------------------------------------------------------------------------

BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2}  # fmt: skip


def test_the_masks_of_an_encoder_and_a_decoder_must_say_the_same() -> None:
    """Packing takes the encoder's padding out of both: what the decoder's own mask hides would be seen."""
    model, eager = pair("Bart", "Model", **BART)
    inputs = padded([7, 3])
    mask, more = inputs["attention_mask"], {"decoder_input_ids": inputs["input_ids"].flip(0), "use_cache": False}
    same, ones = {"decoder_attention_mask": mask}, {"decoder_attention_mask": torch.ones_like(mask)}
    dense = {"input_ids": inputs["input_ids"]}
    hidden = {"decoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0, 0]])}
    row = {"input_ids": dense["input_ids"][:1], "decoder_input_ids": more["decoder_input_ids"][:1], "use_cache": False}
    for given, everywhere in (
        (inputs | more | same, False),
        (dense | more | ones, True),
        (row, True),
        (inputs | more, True),
        (inputs | more | ones, True),
        (dense | more | same, True),
        (row | hidden, True),
        (dense | more | {"decoder_input_ids": inputs["input_ids"][:, :4]}, True),
    ):
        before = replays(model), sum(fallbacks(model).values())
        got, want = call(model, **given), call(eager, **given)
        seen = torch.ones_like(given["input_ids"]) if everywhere else mask
        close(got.encoder_last_hidden_state[seen.bool()], want.encoder_last_hidden_state[seen.bool()])
        everything = torch.ones(want[0].shape[:2]) if everywhere else mask
        rows_equal(got[0], want[0], everything)
        assert (replays(model) > before[0]) + sum(fallbacks(model).values()) - before[1] == 1, given
    assert replays(model) == 5  # one request a launch
    assert fallbacks(model) == {Reason.MASK: 4, Reason.ARGUMENTS: 1}


def relative_positions() -> Any:
    """An encoder whose attention adds a learned bias by distance."""
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    return transformers.T5EncoderModel(config).eval()


def test_what_was_refused_is_explained_as_refused() -> None:
    model, eager = relative_positions(), relative_positions()
    fgc.compile(model, **OPTIONS)
    ids = padded([9])["input_ids"]
    with torch.no_grad():
        close(model(input_ids=ids)[0], eager(input_ids=ids)[0])
        assert fgc.decision(model, input_ids=ids) == fgc.Decision(fgc.Route.EAGER, None, Reason.UNMARKED)
        assert fgc.explain(model, input_ids=ids).startswith("eager: an attention call was not understood")
    report = fgc.report(model)
    assert report.fallbacks == {Reason.UNMARKED: 1} and "T5EncoderModel: no graphs" in str(report)
    assert "block.0.layer.0.self_attention.relative_attention_bias.weight" in report.details[Reason.UNMARKED]


def test_unsafe_error_raises_for_attention_that_is_not_understood() -> None:
    model = relative_positions()
    fgc.compile(model, **OPTIONS, unsafe="error")
    for _ in range(2):
        with torch.no_grad(), pytest.raises(fgc.FallbackError, match=r"not understood.*unsafe='error'"):
            model(**padded([9, 4]))


def test_a_warm_up_that_captures_nothing_says_why() -> None:
    model, _ = pair("Qwen3", "Model")
    told = str(fgc.warmup(model.train()))
    assert "Qwen3Model: not captured yet" in told and "why: the module is in training mode (call eval()" in told
    assert "why:" not in str(fgc.warmup(model.eval()))
    with pytest.raises(ValueError, match="nothing of this Qwen3Model is compiled"):
        fgc.warmup(tiny("Qwen3", "Model"))


def test_an_error_of_the_callers_own_call_comes_alone() -> None:
    model, _ = pair("Qwen3", "Model")
    with torch.no_grad(), pytest.raises(RuntimeError) as raised:
        model(input_ids=padded([9])["input_ids"][0])
    assert raised.value.__context__ is None
    assert "one packed row is input_ids[None]" in fgc.report(model).details[Reason.ARGUMENTS]


def test_what_cannot_be_traced_is_told_once_and_not_by_torch_too(caplog: pytest.LogCaptureFixture) -> None:
    with arch.quiet():
        model = arch.build(arch.Result("base", "canine"))
    fgc.compile(model, **arch.OPTIONS)
    ids = torch.randint(4, 60, (1, 17))
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            model(input_ids=ids)
    assert not fgc.report(model).replays
    assert [r.name for r in caplog.records if r.levelno >= logging.WARNING] == ["fullgraph_compile"]
