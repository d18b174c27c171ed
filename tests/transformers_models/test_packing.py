"""Padded batches: packed before the trace, scattered back after it, or refused."""

from __future__ import annotations

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.transformers_models.whole import call, close, fallbacks, padded, pair, replays, rows_equal, tiny

BATCHES = [[5], [3, 7], [4, 4, 4], [1, 9, 2, 6], [7, 1, 3, 5, 2]]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2", "GPT2", "OPT"])
def test_padded_batches_equal_eager_at_every_real_token(name: str) -> None:
    model, eager = pair(name, "Model")
    for side in ("right", "left"):
        for i, lengths in enumerate(BATCHES):
            inputs = padded(lengths, side, seed=i, width=9)
            got = call(model, **inputs, use_cache=False).last_hidden_state
            rows_equal(got, call(eager, **inputs, use_cache=False).last_hidden_state, inputs["attention_mask"])
            assert not got[~inputs["attention_mask"].bool()].any()
    assert replays(model) == 2 * len(BATCHES)
    assert not fallbacks(model)
    assert fgc.report(model).compiles == 1
    assert fgc.report(model).device_reads == 0


def test_a_batch_without_a_mask_is_all_real() -> None:
    model, eager = pair("Llama", "Model")
    for rows, columns in ((2, 5), (3, 4), (1, 7), (5, 1)):
        inputs = padded([columns] * rows)
        want = call(eager, **inputs, use_cache=False)[0]
        for given in (inputs, {"input_ids": inputs["input_ids"]}):
            rows_equal(call(model, **given, use_cache=False)[0], want, inputs["attention_mask"])
    assert replays(model) == 8
    assert fgc.report(model).compiles == 1


def test_rows_without_a_real_token_come_back_as_zeros() -> None:
    model, eager = pair("Llama", "Model")
    for lengths in ([4, 0, 3], [0, 5], [2, 0]):
        inputs = padded(lengths)
        got = call(model, **inputs, use_cache=False)[0]
        assert torch.isfinite(got).all()
        assert not got[inputs["attention_mask"] == 0].any()
        rows_equal(got, call(eager, **inputs, use_cache=False)[0], inputs["attention_mask"])
    assert replays(model) == 3
    inputs = padded([0, 0], width=4)
    got = call(model, **inputs, use_cache=False)[0]
    assert got.shape == (2, 4, 32)
    assert not got.any()


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
        torch.ones(2, 1, 4, 4, dtype=torch.bool).tril().contiguous(),
        torch.ones(2, 1, 4, 4, dtype=torch.bool),
    ],
    ids=["a hole", "four dims, causal", "four dims, all"],
)
def test_a_mask_that_is_no_padding_is_refused_and_never_ignored(mask: torch.Tensor) -> None:
    model, eager = pair("Llama", "Model")
    ids = padded([4, 4])["input_ids"]
    want = call(eager, input_ids=ids, attention_mask=mask, use_cache=False)[0]
    assert torch.equal(call(model, input_ids=ids, attention_mask=mask, use_cache=False)[0], want)
    assert fallbacks(model) == {Reason.MASK: 1}
    assert not replays(model)
    with torch.no_grad(), fgc.PrefillBatch([4, 4], device="cpu"), pytest.raises(fgc.FallbackError, match="mask"):
        model(input_ids=ids, attention_mask=mask, use_cache=False)


def test_masks_of_every_dtype() -> None:
    model, eager = pair("Llama", "Model")
    inputs = padded([3, 7])
    for count, dtype in enumerate((torch.bool, torch.int32, torch.float32), 1):
        inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
        rows_equal(call(model, **inputs, use_cache=False)[0], call(eager, **inputs, use_cache=False)[0],
                   inputs["attention_mask"])  # fmt: skip
        assert replays(model) == count


def test_a_batch_gives_the_lengths_of_a_padded_call() -> None:
    model, eager = pair("Llama", "Model")
    inputs = padded([3, 7, 5])
    want = call(eager, **inputs, use_cache=False)[0]
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        with fgc.PrefillBatch([3, 7, 5], device="cpu"):
            rows_equal(call(model, **given, use_cache=False)[0], want, inputs["attention_mask"])
    assert replays(model) == 2
    for wrong in ([3, 7], [3, 8, 5], [3, 7, 4]):
        with fgc.PrefillBatch(wrong, device="cpu"), pytest.raises(ValueError, match=r"describe|other lengths"):
            call(model, **inputs, use_cache=False)


def test_a_mask_that_only_the_device_knows_is_used_without_reading_it() -> None:
    from fullgraph_compile.integrations.packing import Packing, Spans, spans_of

    rows = torch.arange(1.0, 25).view(2, 12, 1)
    for side in ("left", "right"):
        mask = padded([3, 7], side, width=12)["attention_mask"]
        packing = Packing(Spans(12, (3, 7), None), torch.device("cpu"), mask)
        on_host = Packing(spans_of(mask), torch.device("cpu"))
        assert torch.equal(packing.pack(rows), on_host.pack(rows))
        assert torch.equal(packing.column_of_token, on_host.column_of_token)
        assert torch.equal(packing.unpack(packing.pack(rows)[0]), rows * mask[..., None])
        for lengths in ((4, 7), (3, 6)):
            lying = Packing(Spans(12, lengths, None), torch.device("cpu"), mask)
            assert lying.unpack(lying.pack(rows)[0]).isnan().all()
    holes = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    packing = Packing(Spans(4, (3, 4), None), torch.device("cpu"), holes)
    assert packing.unpack(packing.pack(rows.view(2, 12)[:, :4])[0]).isnan().all()


def test_a_padded_call_asks_no_tensor_for_its_values() -> None:
    """No op whose result depends on data, no value read: on a device each would wait for it."""
    model, _ = pair("Llama")
    calls = [padded([3, 7, 5], side) for side in ("right", "left", "right")]
    for inputs in calls:
        call(model, **inputs, use_cache=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for inputs in calls:
            call(model, **inputs, use_cache=False)
    names = {event.name.removeprefix("aten::") for event in seen.events()}
    assert "index_select" in names or "index" in names or "embedding" in names
    assert not names & {"item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero"}
    assert replays(model) == 6


@pytest.mark.gpu
def test_a_mask_on_the_device_is_read_once_and_not_at_all_where_a_batch_gives_the_lengths() -> None:
    model = tiny("Llama").cuda()
    fgc.compile(model, buckets=[16, 48])
    lengths = [3, 7, 5]
    inputs = {k: v.cuda() for k, v in padded(lengths).items()}
    for _ in range(2):
        call(model, **inputs, use_cache=False)
    assert fgc.report(model).device_reads == 2
    with fgc.PrefillBatch(lengths, device="cuda"):
        call(model, **inputs, use_cache=False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(model, **inputs, use_cache=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert fgc.report(model).device_reads == 2


@pytest.mark.gpu
def test_what_a_head_and_a_loss_read_of_a_batch_comes_with_the_mask_in_one_read() -> None:
    model, eager = tiny("Qwen3", "ForSequenceClassification").cuda(), tiny("Qwen3", "ForSequenceClassification").cuda()
    eager.load_state_dict(model.state_dict())
    fgc.compile(model, buckets=[16, 48])
    lengths = [3, 7, 5]
    inputs = {k: v.cuda() for k, v in padded(lengths).items()}
    for reads in (1, 2):
        close(call(model, **inputs).logits, call(eager, **inputs).logits, tolerance=1e-3)
        assert fgc.report(model).device_reads == reads
    inputs["attention_mask"] = inputs["attention_mask"].cpu()
    call(model, **inputs)
    assert fgc.report(model).device_reads == 3
    full = {k: v.cuda() for k, v in padded([7, 7]).items()}
    call(model, input_ids=full["input_ids"])
    assert fgc.report(model).device_reads == 3
