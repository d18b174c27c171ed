"""What a padded call costs on the host, in numbers that no machine changes: ops, and memory that is made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile import batch as batches
from fullgraph_compile.host_values import to_device
from fullgraph_compile.integrations import hf_positions, packing
from fullgraph_compile.watching import WORKS
from tests.test_launch_counts import graphs_that_do_nothing, host_ops, python_calls
from tests.transformers_models.whole import OPTIONS, padded, tiny

# What metadata, whatever is in it, and where the inputs are take.
STAGED = Counter({"copy_": 1})
# Views, and what reads a mask on the host: they launch nothing.
VIEWS = frozenset(
    {"narrow", "view", "reshape", "select", "slice", "unsqueeze", "unbind", "expand", "lift_fresh", "detach", "to",
     "resolve_conj", "resolve_neg"}
)  # fmt: skip


def pooler(name: str) -> Counter[str]:
    return Counter({"linear": 1, "tanh": 1}) if name == "Bert" else Counter()


def ready(name: str) -> Any:
    model = tiny(name, "Model")
    return fgc.compile(model, **OPTIONS, strict=True)


def calls(model: Any) -> dict[str, dict[str, Tensor]]:
    """Kinds of padded calls, with one more input that has a row for each token where the model takes any."""
    found = {
        "one sentence": padded([6]),
        "dense": padded([6, 6]),
        "padded right": padded([6, 4, 5]),
        "padded left": padded([6, 4, 5], "left"),
    }
    if type(model).__name__ == "BertModel":
        found = {
            k: {**v, "token_type_ids": torch.zeros_like(v["input_ids"])} for k, v in found.items() if "left" not in k
        }
    return found


def counted(model: Any, given: dict[str, Tensor]) -> tuple[Counter[str], int]:
    """Ops of a call that are not within others and no views, and how often memory is made."""

    def call() -> None:
        with torch.inference_mode():
            model(**given, **({} if type(model).__name__ == "BertModel" else {"use_cache": False}))

    with graphs_that_do_nothing(model):
        for _ in range(3):
            call()
        before = sum(fgc.report(model).replays.values())
        top, within = host_ops(call)
        assert sum(fgc.report(model).replays.values()) == before + 1
    ops = Counter({name.removeprefix("aten::"): n for name, n in top.items() if name.startswith("aten::")})
    made = sum(within[f"aten::{name}"] for name in ("empty", "empty_strided", "resize_"))
    assert sum(ops[view] for view in VIEWS) <= 16, ops
    return Counter({name: n for name, n in ops.items() if name not in VIEWS}), made


@pytest.mark.parametrize("name", ["Bert", "Qwen3"])
def test_one_sentence_is_neither_gathered_nor_scattered(name: str) -> None:
    model = ready(name)
    ops, made = counted(model, calls(model)["one sentence"])
    assert ops == STAGED + Counter({"empty_like": 1}) + pooler(name)
    # The result; what the pooler makes is not seen.
    assert made == 1


@pytest.mark.parametrize("name", ["Bert", "Qwen3"])
def test_a_batch_without_padding_is_neither_gathered_nor_scattered(name: str) -> None:
    model = ready(name)
    ops, made = counted(model, calls(model)["dense"])
    assert ops == STAGED + Counter({"empty_like": 1}) + pooler(name)
    # The result, and positions that begin anew in each row.
    assert made == 2


# A pooler reads the first column.
@pytest.mark.parametrize(("name", "side"), [("Bert", "right"), ("Qwen3", "right"), ("Qwen3", "left")])
def test_a_padded_batch_gathers_each_input_once_and_scatters_each_result_once(name: str, side: str) -> None:
    model = ready(name)
    given = calls(model)[f"padded {side}"]
    ops, made = counted(model, given)
    gathers = len(given) - 1  # not the mask
    moved = Counter({"index_select": gathers, "new_zeros": 1, "index_copy_": 1})
    # The result is not copied besides.
    assert ops == STAGED + moved + pooler(name)
    assert made == gathers + 1


def test_where_the_tokens_are_takes_one_copy_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    for module in (packing, hf_positions, batches):
        monkeypatch.setattr(module, "to_device", lambda values, device: copied.append(1) or to_device(values, device))
    for name in ("Bert", "Qwen3"):
        model = ready(name)
        for kind, given in calls(model).items():
            for _ in range(2):
                copied.clear()
                with torch.inference_mode():
                    model(**given)
            assert len(copied) == int("padded" in kind), kind


@pytest.mark.skipif(not WORKS, reason="all guards are asked at each call on this Python")
@pytest.mark.parametrize(("kind", "most"), [("one sentence", 145), ("padded right", 160)])
def test_steps_in_python_of_a_padded_call_are_few_and_the_same_for_any_rows(kind: str, most: int) -> None:
    model = ready("Bert")
    given = calls(model)[kind]
    counts = []
    for times in (1, 2):
        more = {k: v.repeat(times if kind != "one sentence" else 1, 1) for k, v in given.items()}

        def call(more: dict[str, Tensor] = more) -> None:
            with torch.inference_mode():
                model(**more)

        with graphs_that_do_nothing(model):
            call(), call(), call()
            found = python_calls(call)
        # Each of these is of the way that a call takes the first time, and costs more than all of it later.
        slow = ("contextlib", "dataclasses", "_pytree", "transformers.utils", "hf_front.__init__", "numpy.lib")
        assert not [name for name in found if any(part in name for part in slow)], found
        counts.append(found.total())
    assert max(counts) == min(counts), counts
    assert max(counts) <= most, found
