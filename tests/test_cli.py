"""The command line: what it prints, and what it exits with."""

from __future__ import annotations

import importlib.metadata
import runpy
from collections.abc import Iterator

import pytest
import torch

from fullgraph_compile import attention, cli
from fullgraph_compile.attention import conformance
from fullgraph_compile.attention.probes import probes
from tests.attention.broken import LeavesPaddedRows, Sound
from tests.command_line import run

FAILING = "leaves-padded-rows"


@pytest.fixture(autouse=True)
def short_battery(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three probes, on a machine without a GPU, where one backend is wrong."""
    kept = ("padded rows are zeros", "sinks", "soft cap")
    monkeypatch.setattr(conformance, "probes", lambda *args: tuple(p for p in probes(*args) if p.name in kept))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    known = {name: attention._backends[name] for name in ("reference", "varlen")}
    monkeypatch.setattr(attention, "_backends", known)
    attention.register("no-sinks", NoSinks)
    attention.register(FAILING, Failing)
    yield


class NoSinks(Sound):
    paged = False

    def supports(self, site, device):
        return ["it has no [sinks]"] if site.sinks else []


class Failing(LeavesPaddedRows):
    paged = False


def cells(out: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


def test_the_console_script_is_this() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="fgc")
    assert script.load() is cli.main


def test_the_package_can_be_run_as_a_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fgc", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("fullgraph_compile", run_name="__main__")
    assert not stop.value.code and capsys.readouterr().out.startswith("fullgraph-compile ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert (code, out.strip()) == (0, f"fullgraph-compile {importlib.metadata.version('fullgraph-compile')}")


def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0 and "doctor" in out and "check every attention backend" in out


def test_doctor_prints_the_machine_and_a_table_of_backends_and_probes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--dtype", "float32")
    assert code == 0, "no backend was named"
    assert f"torch {torch.__version__}" in out and "GPU: none" in out
    assert f"transformers {importlib.metadata.version('transformers')}" in out
    table = cells(out)
    assert table["padded rows are zeros"] == ["FAILED", "ok", "ok"]
    assert table["sinks"] == ["ok", "not supported", "ok"]
    assert table["soft cap"] == ["ok", "ok", "ok"]
    assert f"{FAILING}: 1 probes FAILED\n  padded rows are zeros: replay 1, " in out
    assert "padded row 100 holds 1 instead of zeros" in out
    assert "no-sinks: ok\n" in out and "  not supported: sinks: it has no [sinks]\n" in out
    assert "varlen: unsupported on cpu: the device is cpu; it runs on CUDA only" in out


@pytest.mark.parametrize(
    ("names", "code"),
    [(["reference"], 0), (["no-sinks"], 0), ([FAILING], 1), (["varlen"], 1), (["reference", FAILING], 1)],
)
def test_a_named_backend_that_fails_or_cannot_run_is_a_failure(
    names: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    got, out, _ = run(capsys, "doctor", "--attention", *names, "--dtype", "float32")
    assert got == code
    assert all(f"{name}: " in out for name in names)
    assert not any(f"{name}: " in out for name in attention._backends if name not in names)


def test_a_backend_that_is_named_twice_is_checked_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "doctor", "--attention", "no-sinks", "--attention", "no-sinks", "--dtype", "float32")
    assert out.count("no-sinks: ok") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["doctor", "--attention", "flash"], ["invalid choice: 'flash'", "no-sinks", "reference", "varlen"]),
        (["doctor", "--device", "tpu"], ["invalid choice: 'tpu'", "cpu", "cuda"]),
        (["doctor", "--dtype", "int8"], ["invalid choice: 'int8'", "float32", "bfloat16"]),
        (["doctor", "--fast"], ["unknown argument --fast; valid are --help, --attention, --device, --dtype"]),
        (["doctor", "now"], ["unknown argument now; valid are --help, --attention, --device, --dtype"]),
        (["doctor", "--dev", "cpu"], ["unknown argument --dev cpu; valid are"]),
        (["--verbose"], ["unknown argument --verbose; valid are --help, --version, doctor, ladder, bench"]),
        (["surgeon"], ["invalid choice: 'surgeon'", "doctor"]),
        (["doctor", "--device", "cuda"], ["--device cuda: torch finds no CUDA device here; valid is cpu"]),
    ],
)
def test_arguments_that_are_not_valid_are_errors_that_list_those_that_are(
    argv: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out
    assert all(text in err for text in said), err
