"""The bodies that are measured: what their weights are taken to be, and which folders are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fullgraph_compile.bench.models import build, projections
from tests.command_line import run
from tests.models import tiny

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0,
}  # fmt: skip
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16


def on_meta(name: str, **changes: Any) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def test_the_weights_of_gpt2_are_those_of_its_conv1d() -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes)
    with torch.device("meta"):
        assert projections(transformers.GPT2Model(config)) == 2 * (4 * 32 * 32 + 2 * 32 * 128)


@pytest.mark.parametrize("name", ["GPT2", "Mixtral"])
def test_a_folder_whose_weights_are_no_linears_is_measured_against_a_limit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {**SIZES, "num_local_experts": 4, "max_position_embeddings": 16}
    transformers.AutoModel.from_config(getattr(transformers, f"{name}Config")(**sizes)).save_pretrained(tmp_path / "m")
    file = tmp_path / "b.json"
    argv = ["bench", str(tmp_path / "m"), "--device", "cpu", "--repeats", "3", "--json", str(file)]
    code, out, err = run(capsys, *argv)
    assert code == 0 and "GB of weights" in out, err
    found = json.loads(file.read_text())
    # Of the default sizes only 8 has positions.
    assert found["limit_ms"].keys() == {"8"} and found["limit_ms"]["8"] > 0 and not found["failed"]


@pytest.mark.parametrize(
    ("name", "changes", "experts"),
    [
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 2 * 3 * 32 * 64),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 9}, 4 * 3 * 32 * 64),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 3}, 3 * 3 * 32 * 16),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 1}, 1 * 3 * 32 * 64),
    ],
)
def test_of_experts_those_of_one_token_are_counted(name: str, changes: dict[str, int], experts: int) -> None:
    router = 4 * 32
    assert projections(on_meta(name, **changes)) == 2 * (ATTENTION + router + experts)


def test_a_matrix_of_three_dims_that_holds_no_experts_is_counted_whole() -> None:
    body = on_meta("XLNet", d_model=32, n_layer=2, n_head=4, d_inner=64)
    relative = 5 * 32 * 32
    assert projections(body) == pytest.approx(2 * (relative + 2 * 32 * 64), rel=0.01)


def weights_cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def weights_in_lfs(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 4\n")


def change(**values: Any) -> Callable[[Path], None]:
    def of(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return of


def config_of(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


def vision(folder: Path) -> None:
    transformers.ViTConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(folder)


def audio(folder: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Wav2Vec2Config(**sizes, conv_dim=[8], conv_kernel=[3], conv_stride=[2])
    transformers.Wav2Vec2Model(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (weights_cut, "SafetensorError"),
        (weights_in_lfs, "SafetensorError"),
        (change(hidden_size=64), "ignore_mismatched_sizes"),
        (change(num_hidden_layers="two"), "num_hidden_layers"),
        (config_of("[1, 2]"), "Error: "),  # a TypeError, a ValueError from transformers 5.24 on
        (config_of("{"), "not a valid JSON"),
        (vision, "its config has no vocab_size"),
        (audio, "its forward has no input_ids"),
    ],
)
@pytest.mark.parametrize("command", ["ladder", "bench"])
def test_a_folder_that_cannot_be_measured_is_an_error_of_one_line(
    command: str, damage: Callable[[Path], None], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("Llama").save_pretrained(tmp_path)
    damage(tmp_path)
    code, _, err = run(capsys, command, str(tmp_path), "--device", "cpu")
    said = err.strip().splitlines()[-1]
    assert code == 2 and said.startswith(f"fgc {command}: model folder '{tmp_path}': ") and cause in said, err


def test_a_folder_of_an_encoder_and_a_decoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        build(str(tmp_path), torch.device("cpu"), torch.float32)
