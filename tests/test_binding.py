"""Calls that are alike are looked at once; what is not alike is not taken for it."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.compiled_body import compiled_body
from fullgraph_compile.integrations.plain import OneRow, PlainModule
from fullgraph_compile.integrations.transformers import TransformersModule
from tests.models import T2, tiny, tokens
from tests.runtime.bodies import equal, first, ready


class Counted:
    """A compiled body, its eager twin, and how often its calls were looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, kind: type[PlainModule]) -> None:
        self.looked: Counter[str] = Counter()
        bind = kind.bind

        def counted(integration: Any, *args: Any) -> Any:
            self.looked["at"] += 1
            return bind(integration, *args)

        monkeypatch.setattr(kind, "bind", counted)
        self.body = ready("compile", module, buckets=[8, 16])

    def __call__(self, lengths: list[int], **given: Any) -> tuple[Any, int]:
        """The result, and how often a call was looked at for it."""
        before = self.looked["at"]
        n = sum(lengths)
        batch = fgc.PrefillBatch(lengths, device="cpu")
        call = {"input_ids": tokens(n)[None], "position_ids": batch.position_ids[None], **given}
        with torch.no_grad(), batch:
            out = self.body(**{k: v for k, v in call.items() if v is not ...})
        return out, self.looked["at"] - before


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch, tiny("Llama", num_hidden_layers=1), TransformersModule)


def test_calls_that_differ_in_their_tokens_are_alike(llama: Counted) -> None:
    # One request, or several: the first call of each is looked at, and traced by.
    for lengths in ([3, 4], [3, 4], [7]):
        llama(lengths, use_cache=False)
    for lengths in ([5], [2, 3], [1] * 9, [16]):
        out, looked = llama(lengths, use_cache=False)
        assert looked == 0, lengths
        alone = [
            first(llama.body(input_ids=tokens(sum(lengths))[None, a:b], use_cache=False)) for a, b in spans(lengths)
        ]
        equal(first(out), torch.cat(alone, 1))


def spans(lengths: list[int]) -> list[tuple[int, int]]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def test_positions_that_are_not_given_are_those_of_each_batch(llama: Counted) -> None:
    for _ in range(2):
        llama([3, 4], use_cache=False, position_ids=...)
    for lengths in ([4, 3], [2, 5, 4]):
        got, looked = llama(lengths, use_cache=False, position_ids=...)
        assert looked == 0
        equal(first(got), first(llama(lengths, use_cache=False)[0]))


def test_one_row_outside_of_a_batch_is_one_request_of_its_own_length(llama: Counted) -> None:
    def plain(n: int, **given: Any) -> Tensor:
        with torch.no_grad():
            return first(llama.body(**(given or {"input_ids": tokens(n)[None]}), use_cache=False))

    plain(6), plain(6)
    compiled = compiled_body(llama.body)
    assert compiled is not None
    assert OneRow in {type(known.bind) for known in compiled.binder._known.values()}
    for n in (2, 9, 16, 5, 2):
        equal(plain(n), first(llama([n], use_cache=False)[0]))
    # A batch of other lengths is an error, as it is for a call that is looked at.
    with fgc.PrefillBatch([3, 4], device="cpu"), pytest.raises(ValueError, match="add up to 7"):
        plain(6)
    with fgc.PrefillBatch([3, 3], device="cpu"):
        packed = plain(6)
    equal(packed[:, 3:], first(llama([3], use_cache=False, input_ids=tokens(6)[None, 3:])[0]))
    assert not torch.allclose(packed[:, 3:], plain(6)[:, 3:])


def test_what_is_given_otherwise_is_looked_at(llama: Counted) -> None:
    n = 7
    plain: dict[str, Any] = {"use_cache": False}
    others: dict[str, dict[str, Any]] = {
        "one more constant": {**plain, "return_dict": True},
        "a result of another kind": {**plain, "return_dict": False},
        "a mask": {**plain, "attention_mask": torch.ones(1, n, dtype=torch.int64)},
        "positions without their batch dim": {**plain, "position_ids": torch.arange(n)},
        "embeddings": {**plain, "input_ids": ..., "inputs_embeds": llama.body.embed_tokens(tokens(n))[None].detach()},
        "positions of another type": {**plain, "position_ids": torch.arange(n, dtype=torch.int32)[None]},
    }
    want = first(llama([n], **plain)[0])
    assert llama([n], **plain)[1] == 0
    for name, given in others.items():
        out, looked = llama([n], **given)
        assert looked > 0, name
        equal(first(out), want)
        assert isinstance(out, tuple) == (given.get("return_dict") is False)


def test_calls_with_a_mask_are_alike_and_its_values_count_each_time(llama: Counted) -> None:
    ones = torch.ones(1, 7, dtype=torch.int64)
    for times in (1, 0, 0):
        _, looked = llama([7], use_cache=False, attention_mask=ones)
        assert looked == times
    holes = ones.clone()
    holes[0, 0] = 0
    with pytest.raises(ValueError, match="other lengths than attention_mask"):
        llama([7], use_cache=False, attention_mask=holes)


@pytest.mark.parametrize("in_batch", [False, True])
def test_padded_batches_are_alike_whatever_their_sizes_and_their_padding(llama: Counted, in_batch: bool) -> None:
    def call(lengths: list[int], width: int, *, left: bool = False) -> int:
        before = llama.looked["at"]
        ids, mask = torch.zeros(len(lengths), width, dtype=torch.int64), torch.zeros(len(lengths), width)
        for i, n in enumerate(lengths):
            at = slice(width - n, width) if left else slice(n)
            ids[i, at], mask[i, at] = tokens(n), 1
        batch = fgc.PrefillBatch(lengths, device="cpu") if in_batch else contextlib.nullcontext()
        with torch.no_grad(), batch:
            out = first(llama.body(input_ids=ids, attention_mask=mask.long(), use_cache=False))
        looked = llama.looked["at"] - before
        assert not out[mask == 0].any()
        equal(out[mask == 1], torch.cat([first(llama([n], use_cache=False)[0])[0] for n in lengths if n]))
        return looked

    assert call([2, 3], 4) == 1
    call([2, 3], 4), call([5], 5), call([3], 5)
    for lengths, width in (([2, 3], 4), ([4, 1, 6], 6), ([4, 4], 4), ([3, 2, 4, 1], 7), ([2, 0, 5], 5), ([1, 0], 3)):
        for left in (False, True):
            assert call(lengths, width, left=left) == 0, (lengths, left)
    assert call([3], 5) == call([5], 5) == 0


def test_a_padded_batch_whose_form_does_not_follow_from_its_likeness_is_looked_at(llama: Counted) -> None:
    # As many columns as there are embeddings, so that one size says both.
    width = llama.body.config.hidden_size
    for _ in range(3):
        before = llama.looked["at"]
        embeddings = llama.body.embed_tokens(tokens(2 * width))[None].detach()[:, :width].repeat(2, 1, 1)
        mask = torch.zeros(2, width, dtype=torch.int64)
        mask[0, :3] = mask[1, :5] = 1
        with torch.no_grad():
            out = first(llama.body(inputs_embeds=embeddings, attention_mask=mask, use_cache=False))
        equal(out[0, :3], out[1, :3])
        assert out[0, :3].any() and not out[mask == 0].any()
        assert llama.looked["at"] == before + 1


def test_a_config_that_changes_what_a_call_means_is_followed(llama: Counted) -> None:
    config = llama.body.config
    config.use_cache = False
    for _ in range(3):
        out, looked = llama([7])
    assert looked == 0 and out.past_key_values is None
    config.use_cache = True
    out, looked = llama([7])
    assert looked == 1 and out.past_key_values.get_seq_length() == 7
    config.use_cache = False
    assert llama([7])[0].past_key_values is None


def test_a_model_that_may_put_rows_together_is_told_of_several_requests(llama: Counted) -> None:
    compiled = compiled_body(llama.body)
    assert compiled is not None and isinstance(compiled.integration, TransformersModule)
    compiled.integration._rows_stay = False
    llama.body(input_ids=tokens(7)[None], use_cache=False)
    llama([7], use_cache=False), llama([7], use_cache=False)
    assert llama([7], use_cache=False)[1] == 0
    with pytest.raises(fgc.FallbackError, match="may put rows of several requests"):
        llama([3, 4], use_cache=False)


def test_one_token_is_no_dim_of_its_own(llama: Counted) -> None:
    for _ in range(3):
        _, looked = llama([1], use_cache=False)
        assert looked == 1


def test_a_batch_that_does_not_describe_the_call_is_an_error_also_the_second_time(llama: Counted) -> None:
    for _ in range(2):
        llama([3, 4], use_cache=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="new_tokens add up to 5"):
            llama([5], use_cache=False, input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])
    with pytest.raises(ValueError, match="position_ids has shape"):
        llama([5], use_cache=False, position_ids=torch.arange(6)[None])


def test_a_size_that_is_the_token_count_by_chance_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    body = Counted(monkeypatch, tiny("Llama", num_hidden_layers=1, hidden_size=16), TransformersModule)
    embed = body.body.embed_tokens

    def call(n: int) -> tuple[Tensor, int]:
        out, looked = body([n], use_cache=False, input_ids=..., inputs_embeds=embed(tokens(n))[None].detach())
        return first(out), looked

    for n, times in ((16, 1), (16, 1), (8, 1), (8, 0), (5, 0)):
        out, looked = call(n)
        assert looked == times, n
        equal(out, first(body([n], use_cache=False)[0]))


def test_any_module_has_calls_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    body = Counted(monkeypatch, T2(layers=1).eval(), PlainModule)
    body([5]), body([5]), body([2, 3])
    for lengths in ([7], [3, 4]):
        assert body(lengths)[1] == 0


def test_what_was_known_is_forgotten_when_the_module_is_learned_anew_or_released(llama: Counted) -> None:
    llama([7], use_cache=False), llama([7], use_cache=False)
    compiled = compiled_body(llama.body)
    assert compiled is not None and compiled.binder._known
    fgc.release(llama.body)
    assert not compiled.binder._known
    assert llama([7], use_cache=False)[1] == 1


def test_the_result_is_made_as_its_class_makes_it(llama: Counted) -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    llama([7], use_cache=False)
    out, _ = llama([7], use_cache=False)
    want = BaseModelOutputWithPast(last_hidden_state=out.last_hidden_state)
    assert type(out) is type(want)
    assert list(out.items()) == list(want.items()) and vars(out) == vars(want)
    assert out[0] is out["last_hidden_state"] is out.last_hidden_state
    out.last_hidden_state = None
    out["hidden_states"] = ()
    assert out.hidden_states == ()
