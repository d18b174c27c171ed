"""Ctrl-C, and a reader that leaves: what was measured is kept."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullgraph_compile import cli, fitting
from fullgraph_compile.attention.conformance import check_attention
from fullgraph_compile.bench import arguments, models, run
from fullgraph_compile.bench.interrupts import raise_if_interrupted, remembered
from fullgraph_compile.bench.limits import Limit
from tests.command_line import run as run_command
from tests.test_cli_ladder import TINY

BENCH = ("bench", "--tokens", "8", "--repeats", "3")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(models.PRESETS, models.SMALL, ("Llama", TINY))
    monkeypatch.setattr(run, "measure_limit", lambda n, dtype, device: Limit(1e12, 1e15, 4 * n, n))


def ctrl_c(*args: Any, **kwargs: Any) -> Any:
    signal.raise_signal(signal.SIGINT)


class PressedWhenFreed:
    def __del__(self) -> None:
        ctrl_c()


def test_bench_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run.Ours, "start", ctrl_c)
    code, out, _ = run_command(capsys, *BENCH, "--json", str(tmp_path / "b.json"))
    assert code == 130 and "not measured: the rest: interrupted" in out
    found = json.loads((tmp_path / "b.json").read_text())
    assert set(found["times"]["eager"]) == {"8"} and found["interrupted"]


def test_bench_is_interrupted_before_the_first_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "measure_limit", ctrl_c)
    files = [tmp_path / "b.json", tmp_path / "b.png"]
    code, out, _ = run_command(capsys, *BENCH, "--json", str(files[0]), "--plot", str(files[1]))
    assert code == 130 and "not measured: the rest: interrupted" in out and "nothing to draw" in out
    assert json.loads(files[0].read_text())["limit"] is None and not files[1].exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_finalizer_ends_the_measurement_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = run.forget

    def freed(device: torch.device) -> None:
        PressedWhenFreed()
        forget(device)

    monkeypatch.setattr(run, "forget", freed)
    code, out, _ = run_command(capsys, *BENCH, "--routes", "eager", "full_prefill")
    assert code == 130 and "not measured: the rest: interrupted" in out
    assert "eager: the transformers model" in out and "one graph per token bucket" not in out


@pytest.mark.parametrize("argv", [("ladder", "--max-tokens", "8", "--layers", "1"), BENCH])
def test_without_a_result_it_is_one_line(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "build", ctrl_c) if argv is BENCH else monkeypatch.setattr(
        fitting, "seconds", ctrl_c
    )
    code, _, err = run_command(capsys, *argv)
    assert code == 130 and err.splitlines()[-1].startswith(f"fgc {argv[0]}: interrupted") and "Traceback" not in err


def test_doctor_prints_the_backends_that_were_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(name: str, *args: Any, **kwargs: Any) -> Any:
        return ctrl_c() if name == "varlen" else check_attention(name, *args, **kwargs)

    monkeypatch.setattr(cli, "check_attention", checked)
    code, out, _ = run_command(capsys, "doctor", "--device", "cpu", "--attention", "triton", "varlen", "reference")
    assert code == 130 and "triton: unsupported on cpu" in out
    assert out.splitlines()[-1] == "interrupted; not checked: varlen, reference"


def test_ctrl_c_is_what_it_was_once_a_command_has_ended() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), remembered():
        ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before
    with remembered():
        raise_if_interrupted()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with remembered():
            ctrl_c()
            raise_if_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("argv", [("ladder", "--max-tokens", "16", "--layers", "1"), (*BENCH, "--routes", "eager")])
def test_a_reader_that_leaves_ends_what_is_printed_not_what_is_written(
    argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fitting, "seconds", lambda call, device: 1.0)
    file = tmp_path / "found.json"
    streams = []
    for name in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        streams.append(os.fdopen(writer, "w"))
        monkeypatch.setattr(sys, name, streams[-1])
    code = cli.main([*argv, "--json", str(file)])
    for stream in streams:
        stream.close()
    monkeypatch.undo()
    assert code == 0 and json.loads(file.read_text())["model"] == models.SMALL
