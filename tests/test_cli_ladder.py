"""``fgc ladder``: what it measures, prints and writes, and which arguments it refuses."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from fullgraph_compile import fitting
from fullgraph_compile.bench import arguments, models
from fullgraph_compile.bench.arguments import read_lengths
from fullgraph_compile.bench.models import build, projections, vocabulary
from fullgraph_compile.measured_ladder import Forecast, MeasuredLadder
from tests.command_line import described_fields, run

MEASURED = {f.name for f in dataclasses.fields(MeasuredLadder)}
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(models.PRESETS, models.SMALL, ("Llama", TINY))

    def seconds(call: Any, device: torch.device) -> float:
        call()
        return 1.5 if call.func.__name__ == "exact" else 1.0 if call.args[0] <= 16 else 2.0

    monkeypatch.setattr(fitting, "seconds", seconds)


def test_ladder_prints_the_choice_against_the_default_and_ends_with_the_buckets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "new" / "ladder.json"
    code, out, _ = run(capsys, "ladder", "--max-tokens", "32", "--layers", "1", "--json", str(file))
    assert code == 0
    assert "No GPU" in out and "by the default ladder of 3" in out
    assert out.splitlines()[-1] == "buckets=[16]"
    found = json.loads(file.read_text())
    assert found["buckets"] == [16] and found["crossover"] == 16 and found["model"] == models.SMALL
    assert [t["tokens"] for t in found["timings"]] == [8, 16, 24, 32]


def test_the_json_holds_what_it_takes_to_measure_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [tmp_path / "lengths", tmp_path / "l.json"]
    files[0].write_text('{"30": 2, "7": 0.5}')
    argv = [
        "ladder", "--max-tokens", "32", "--layers", "1", "--lengths", str(files[0]), "--memory-budget", "1KiB",
        "--attention", "reference", "--compiler", "aot_eager", "--json", str(files[1]),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["fgc", *argv])
    monkeypatch.setattr(Forecast, "bytes", lambda self, count, largest: 64 * largest)
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    found = json.loads(files[1].read_text())
    assert found["cut"] in out and "memory_budget" in found["cut"]
    assert f"torch {torch.__version__}" in found["machine"] and "fullgraph-compile " in found["machine"]
    got = {name: found[name] for name in found.keys() - {"cut", "machine"} - MEASURED}
    assert got == {
        "command": shlex.join(["fgc", *argv]), "model": models.SMALL, "layers": 1, "device": "cpu", "dtype": "float32",
        "max_tokens": 32, "lengths": [[7, 0.5], [30, 2]], "memory_budget_bytes": 1024, "attention": "reference",
        "compiler": "aot_eager",
    }  # fmt: skip
    assert not found.keys() - MEASURED - described_fields()


def test_ladder_says_where_no_graph_pays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "seconds", lambda call, device: 1.0 if call.func.__name__ == "exact" else 2.0)
    code, out, _ = run(capsys, "ladder", "--max-tokens", "16", "--layers", "1")
    assert code == 0 and "no graph pays" in out and out.splitlines()[-1] == 'graphs="none"'


def test_a_large_preset_is_not_measured_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ladder", "llama-3.1-8b", "--max-tokens", "8")
    assert code == 0 and f"{models.SMALL} is measured in its place" in out


def refused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a model was made")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["gpt-9"], ["'gpt-9' is no preset", "qwen3-8b, qwen3-0.6b, llama-3.1-8b, smollm2-135m"]),
        ([""], ["MODEL", "it is empty"]),
        (["--max-tokens", "0"], ["--max-tokens: '0' must be an integer of at least 1"]),
        (["--layers", "0"], ["--layers: '0' must be an integer of at least 1"]),
        (["--layers", "-1"], ["--layers: '-1' must be an integer of at least 1"]),
        (["--layers", "one"], ["--layers: 'one' must be an integer of at least 1"]),
        (["--memory-budget", "much"], ["'300MiB'"]),
        (["--memory-budget", ""], ["'300MiB'"]),
        (["--lengths", "/nowhere"], ["/nowhere", "a JSON list of token counts"]),
        (["--lengths", ""], ["--lengths: it is empty"]),
        (["--json", ""], ["--json: it is empty"]),
        (["--attention", "nosuch"], ["invalid choice: 'nosuch'", "auto", "reference", "triton"]),
        (["--attention", "triton"], ["--attention triton: ", "runs on CUDA only", "float32 are auto, reference"]),
        (["--compiler", "inductor"], ["--compiler inductor: ", "aot_eager, eager"]),
        (["--device", "cuda"], ["finds no CUDA device"]),
        (["--fast"], ["unknown argument --fast; valid are --help, --layers", "--lengths"]),
    ],
)
def test_bad_arguments_are_errors_that_say_what_is_valid(
    argv: list[str], said: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if argv != ["gpt-9"]:
        monkeypatch.setattr(arguments, "build", refused)
    code, _, err = run(capsys, "ladder", *argv)
    assert code == 2 and all(text in err for text in said), err


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("[30, 7, 30]", ((7, 1), (30, 2))),
        ('{"30": 2, "7": 0.5}', ((7, 0.5), (30, 2))),
        ("30\n7\n30\n", ((7, 1), (30, 2))),
        ("12", ((12, 1),)),
        ("\ufeff[30]", ((30, 1),)),
        ("\ufeff30\n", ((30, 1),)),
    ],
)
def test_lengths_are_read_from_json_or_lines(text: str, lengths: Any, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text(text, encoding="utf-8")
    assert read_lengths(str(file)) == lengths


@pytest.mark.parametrize(
    "content", [b"\x80\xff\x00", b"[" * 100_000, b"", b"[0]", b'["a"]', b'{"a": 1}', b"[30], [40]", b"null", b"1.5"]
)
def test_a_file_that_holds_no_lengths_is_named_with_what_is_valid(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_lengths(str(file))
    assert str(error.value).startswith(f"--lengths {file}: ")
    assert "the file must hold a JSON list of token counts" in str(error.value)


def test_sizes_end_where_the_positions_of_the_model_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "ladder", "--max-tokens", "257")
    assert code == 2 and "--max-tokens 257: the model takes at most 256 tokens" in err
    code, out, _ = run(capsys, "ladder", "--layers", "1")
    assert code == 0 and "│  256 │" in out and out.splitlines()[-1] == "buckets=[16]"


def test_a_measurement_that_fails_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(call: Any, device: torch.device) -> float:
        raise RuntimeError("planned\nsecond line")

    monkeypatch.setattr(fitting, "seconds", broken)
    code, _, err = run(capsys, "ladder", "--max-tokens", "8", "--layers", "1")
    assert code == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("fgc ladder: nothing could be measured: RuntimeError: planned")


def test_a_model_folder_is_built_with_its_own_weights(tmp_path: Path) -> None:
    made = build(models.SMALL, torch.device("cpu"), torch.float32)
    made.save_pretrained(tmp_path)
    loaded = build(str(tmp_path), torch.device("cpu"), torch.float32)
    assert torch.equal(loaded.layers[0].mlp.up_proj.weight, made.layers[0].mlp.up_proj.weight)
    assert not loaded.training and vocabulary(loaded) == 97
    assert projections(loaded) == 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    with pytest.raises(ValueError, match="only a preset"):
        build(str(tmp_path), torch.device("cpu"), torch.float32, layers=1)


def test_the_shapes_of_the_presets_are_those_of_the_models() -> None:
    numbers = {"qwen3-8b": 6.95e9, "qwen3-0.6b": 0.44e9, "llama-3.1-8b": 6.98e9}
    for name, most in numbers.items():
        got = projections(build(name, torch.device("meta"), torch.bfloat16))
        assert got == pytest.approx(most, rel=0.01), name
