"""transformers' ``Trainer`` around a compiled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.transformers_models.whole import VOCABULARY, call, close, fallbacks, padded, pair, replays

pytest.importorskip("accelerate")


def batch_of(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    batch = padded([len(r["input_ids"]) for r in rows])
    for row, example in enumerate(rows):
        batch["input_ids"][row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def trainer_of(model: Any, folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    rows: Any = [{"input_ids": [2 + (i * 7 + j) % (VOCABULARY - 2) for j in range(3 + i)]} for i in range(6)]
    settings = TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=2, per_device_train_batch_size=2, max_steps=2,
        use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    return Trainer(model=model, args=settings, train_dataset=rows, eval_dataset=rows, data_collator=batch_of)


def test_evaluation_replays_and_follows_training(tmp_path: Path) -> None:
    model, eager = pair("Llama")
    losses = []
    for m in (model, eager):
        torch.manual_seed(0)
        trainer = trainer_of(m, tmp_path)
        losses.append([trainer.evaluate()["eval_loss"], trainer.train().training_loss])
        losses[-1] += [trainer.evaluate()["eval_loss"], trainer.predict(trainer.eval_dataset).metrics["test_loss"]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][2] != pytest.approx(losses[0][0], rel=1e-3)
    assert fallbacks(model) == {Reason.TRAINING: 2}
    assert replays(model) == 9


@pytest.mark.parametrize(
    "of_the_loss",
    [{"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"ignore_index": 5}, {"shift_labels": None}],
)
def test_what_only_the_loss_reads_is_no_argument_of_the_body(of_the_loss: dict[str, Any]) -> None:
    model, eager = pair("Llama")
    inputs = padded([3, 9, 6])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, of_the_loss.get("ignore_index", -100))
    if "shift_labels" in of_the_loss:
        of_the_loss = {"shift_labels": torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()}
    got, want = (call(m, **inputs, labels=labels, **of_the_loss) for m in (model, eager))
    close(got.loss, want.loss)
    assert replays(model) == 1
    assert fgc.report(model).compiles == 1


@pytest.mark.parametrize(("side", "masked"), [("left", True), ("right", False)])
def test_a_loss_that_reads_padding_is_that_of_the_model_itself(side: str, masked: bool) -> None:
    # On the left, the token that follows the padding is predicted from there, whatever the labels of padding are.
    model, eager = pair("Llama")
    inputs = padded([3, 9, 6], side)
    labels = inputs["input_ids"].clone()
    if masked:
        labels[inputs["attention_mask"] == 0] = -100
    for i, given in enumerate((((), {"labels": labels}), ((None, None, None, labels), {}))):
        args = (*inputs.values(), *given[0])
        close(call(model, *args, **given[1]).loss, call(eager, *args, **given[1]).loss)
        assert fallbacks(model) == {Reason.MASK: i + 1}
    assert "the loss reads padding" in fgc.report(model).details[Reason.MASK]
    with torch.inference_mode():
        assert fgc.decision(model, **inputs, labels=labels).reason is Reason.MASK
        assert fgc.decision(model, **inputs).reason is None
    labels[:, :7] = -100
    labels[inputs["attention_mask"] == 0] = -100
    close(call(model, **inputs, labels=labels).loss, call(eager, **inputs, labels=labels).loss)
    call(model, **inputs)
    assert replays(model) == 2


@pytest.mark.parametrize(("name", "kind"), [("Bert", "ForMaskedLM"), ("Qwen3", "ForTokenClassification")])
def test_a_loss_of_labels_in_their_own_places_is_replayed_with_padding_on_either_side(name: str, kind: str) -> None:
    model, eager = pair(name, kind)
    for side in ("left", "right"):
        inputs = padded([3, 9, 6], side)
        labels = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
        close(call(model, **inputs, labels=labels).loss, call(eager, **inputs, labels=labels).loss)
    assert replays(model) == 2
