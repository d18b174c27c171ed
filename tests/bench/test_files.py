"""Files of ``fgc bench`` and ``fgc ladder``: refused before a model is made, none lost by another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fullgraph_compile.bench import arguments, models, run
from fullgraph_compile.bench.limits import Limit
from tests.command_line import run as run_command
from tests.test_cli_ladder import TINY, refused


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(models.PRESETS, models.SMALL, ("Llama", TINY))
    monkeypatch.setattr(run, "measure_limit", lambda n, dtype, device: Limit(1e12, 1e15, 4 * n, n))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("folder", "it is a folder or a device"),
        ("/dev/full", "it is a folder or a device"),
        ("new/", "Is a directory"),
        ("file/x.json", "File exists"),
        ("file/y/x.json", "Not a directory"),
        ("/proc/x/x.json", "No such file"),
    ],
)
@pytest.mark.parametrize("command", ["ladder", "bench"])
def test_a_file_that_cannot_be_written_is_refused_before_a_model_is_made(
    command: str,
    path: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    monkeypatch.setattr(arguments, "build", refused)
    code, _, err = run_command(capsys, command, "--json", path)
    said = err.splitlines()[-1]
    assert code == 2 and said.startswith(f"fgc {command}: --json {path}: ") and why in said, err
    assert "valid is the path of a file that can be written" in said


@pytest.mark.parametrize("other", ["a.png", "./a.png", "link.png"])
def test_a_file_is_written_once(
    other: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("link.png").symlink_to("a.png")
    monkeypatch.setattr(arguments, "build", refused)
    code, _, err = run_command(capsys, "bench", "--json", "a.png", "--plot", "b.png", other)
    assert code == 2 and f"--plot {other} is the file of --json; each must have a file of its own" in err
    assert os.listdir() == ["link.png"], "what was tried is not left behind"


def test_what_is_there_is_kept_until_it_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "b.json"
    file.write_text("before")
    code, _, _ = run_command(capsys, "bench", "--json", str(file), "--tokens", "257")
    assert code == 2 and file.read_text() == "before"


def test_a_file_that_fails_after_the_measurement_loses_neither_the_table_nor_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / name / "b" for name in ("json", "png", "svg")]
    files = [file.with_suffix(f".{file.parent.name}") for file in files]

    def in_the_way(body: Any) -> None:
        for folder in (files[0].parent, files[1].parent):
            folder.rmdir()
            folder.touch()

    monkeypatch.setattr(run, "projections", in_the_way)
    code, out, err = run_command(
        capsys, "bench", "--tokens", "8", "--repeats", "3", "--routes", "eager",
        "--json", str(files[0]), "--plot", str(files[1]), str(files[2]),
    )  # fmt: skip
    assert code == 1 and "eager: the transformers model as it is" in out
    assert f"fgc bench: --json {files[0]} was not written: " in err
    assert f"fgc bench: --plot {files[1]} was not written: " in err and "Traceback" not in err
    assert b"<svg" in files[2].read_bytes()


def test_without_a_time_there_is_nothing_to_draw(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "b.json", tmp_path / "b.png"]
    code, out, _ = run_command(
        capsys, "bench", "--tokens", "8", "--routes", "pieces", "--json", str(files[0]), "--plot", str(files[1])
    )
    assert code == 1 and "not measured: pieces: needs a GPU" in out and "nothing to draw" in out
    assert json.loads(files[0].read_text())["not_measured"] and not files[1].exists()
