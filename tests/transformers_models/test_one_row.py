"""Calls of one row without a mask or a batch, as a model is prefilled by hand: the second is not looked at anew."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import fullgraph_compile as fgc
from tests.transformers_models import architectures as arch
from tests.transformers_models.calls import rows_of, tokens_of, without_cache

MODELS = [
    ("causal", "qwen3"),
    ("causal", "gpt2"),
    ("causal", "opt"),
    ("causal", "gemma2"),
    ("causal", "bloom"),
    ("masked", "bert"),
    # Counts its positions from the ids.
    ("masked", "roberta"),
    ("base", "modernbert"),
]


@pytest.mark.parametrize(("mapping", "name"), MODELS)
def test_each_is_what_the_model_makes_of_it(mapping: str, name: str) -> None:
    with arch.quiet():
        model = arch.build(arch.Result(mapping, name))
    eager, more = copy.deepcopy(model), without_cache(model)
    fgc.compile(model, **arch.OPTIONS)
    lengths = (6, 6, 9, 2, 17, 1, 6)
    for seed, n in enumerate(lengths):
        inputs = tokens_of((n,), "dense", seed)
        with torch.no_grad():
            got, want = rows_of(model(**inputs, **more)), rows_of(eager(**inputs, **more))
        assert arch.difference(got[0], want[0]) <= arch.TOLERANCE, n
    assert sum(fgc.report(model).replays.values()) == len(lengths)


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_decoders_own_mask_is_looked_at_each_time(in_batch: bool) -> None:
    with arch.quiet():
        model = arch.build(arch.Result("base", "bart"))
    eager = copy.deepcopy(model)
    fgc.compile(model, **arch.OPTIONS)
    for seed, hidden in enumerate((0, 0, 0, 3, 0)):
        ids = tokens_of((7,), "dense", seed)["input_ids"]
        mask = torch.ones_like(ids)
        mask[:, :hidden] = 0
        given = {"input_ids": ids, "decoder_input_ids": ids, "decoder_attention_mask": mask, "use_cache": False}
        with torch.no_grad():
            with fgc.PrefillBatch([7], device="cpu") if in_batch else contextlib.nullcontext():
                got = rows_of(model(**given))
            assert arch.difference(got[0], rows_of(eager(**given))[0]) <= arch.TOLERANCE, seed
    assert fgc.report(model).fallbacks == {fgc.Reason.MASK: 1}


@pytest.mark.parametrize("ids_first", [False, True])
@pytest.mark.parametrize(("mapping", "name", "replays"), [("masked", "esm", 2), ("masked", "roberta", 4)])
def test_ids_and_embeddings_may_mean_other_positions(mapping: str, name: str, replays: int, ids_first: bool) -> None:
    # ESM counts ids that are no padding, from past its id, and embeddings from zero.
    with arch.quiet():
        model = arch.build(arch.Result(mapping, name))
    eager = copy.deepcopy(model)
    fgc.compile(model, **arch.OPTIONS)
    ids = tokens_of((7,), "dense", 0)
    embeds = {"inputs_embeds": eager.get_input_embeddings()(ids["input_ids"]).detach()}
    for given in [ids, embeds, ids, embeds] if ids_first else [embeds, ids, embeds, ids]:
        with torch.no_grad():
            assert arch.difference(rows_of(model(**given))[0], rows_of(eager(**given))[0]) <= arch.TOLERANCE
    assert sum(fgc.report(model).replays.values()) == replays


def test_arguments_may_be_named_in_any_order() -> None:
    with arch.quiet():
        model = arch.build(arch.Result("base", "bart"))
    eager = copy.deepcopy(model)
    fgc.compile(model, **arch.OPTIONS)
    ids, decoder_ids = (tokens_of((n,), "dense", n)["input_ids"] for n in (7, 4))
    for given in ({"decoder_input_ids": decoder_ids, "input_ids": ids}, {"decoder_input_ids": ids, "input_ids": ids}):
        with torch.no_grad():
            got, want = (rows_of(m(**given, use_cache=False)) for m in (model, eager))
        assert arch.difference(got[0], want[0]) <= arch.TOLERANCE
