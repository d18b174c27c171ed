"""``fgc bench`` on a CPU: the table, JSON and picture, what it says of what it cannot measure, and the limit."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fullgraph_compile.bench import models, run
from fullgraph_compile.bench.limits import Limit, measure_limit
from fullgraph_compile.bench.random_lengths import between, play, random_lengths
from fullgraph_compile.bench.timing import median_ms
from fullgraph_compile.runner import BodyRunner
from tests.command_line import described_fields
from tests.command_line import run as run_command
from tests.test_cli_ladder import TINY

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(models.PRESETS, models.SMALL, ("Llama", TINY))
    monkeypatch.setattr(run, "measure_limit", lambda n, dtype, device: Limit(1e12, 1e15, 4 * n, n))


def fgc(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    return run_command(capsys, "bench", *argv)


def test_on_a_cpu_it_says_what_it_cannot_measure_and_runs_the_small_preset(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "new" / name for name in ("b.json", "b.png", "b.svg")]
    code, out, err = fgc(
        capsys, "qwen3-8b", "--tokens", "30", "8", "--repeats", "3", "--random", "5",
        "--routes", "eager", "compiled", "pieces", "reduce-overhead", "full_prefill",
        "--json", str(files[0]), "--plot", str(files[1]), str(files[2]),
    )  # fmt: skip
    assert code == 0, err
    assert "graphs are off" not in out + err  # the compiled route was asked for
    assert "smollm2-135m is measured in its place" in out and "No GPU" in out
    assert "not measured: reduce-overhead: needs a GPU" in out and "not measured: pieces: needs a GPU" in out
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│ ")]
    sizes = {row[0]: row for row in rows if len(row) == 9}
    assert sizes["8"][-2:] == ["8", "0%"] and sizes["30"][-2:] == ["30", "0%"]
    assert "5 calls of random lengths, full_prefill" in out and "full_prefill takes at most " in out
    found = json.loads(files[0].read_text())
    assert not found.keys() - described_fields()
    assert found["model"] == models.SMALL and found["dtype"] == "float32"
    assert set(found["times"]) == {"eager", "compiled", "pieces", "full_prefill"} and not found["times"]["pieces"]
    assert all(found["times"][r].keys() == {"8", "30"} for r in ("eager", "compiled", "full_prefill"))
    assert found["limit_ms"]["8"] == pytest.approx(1e3 * max(4 * 18432 / 1e12, 2 * 8 * 18432 / 1e15))
    assert found["start_up"]["full_prefill"] > 0 and found["random"]["full_prefill"]["calls"] == 5
    assert files[1].read_bytes().startswith(b"\x89PNG") and b"<svg" in files[2].read_bytes()


def test_a_route_that_fails_is_not_measured_and_the_others_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, body: Any) -> Any:
        raise RuntimeError("planned\nsecond line")

    monkeypatch.setattr(run, "plain_route", broken)
    code, out, _ = fgc(capsys, "--tokens", "8", "--repeats", "3")
    assert code == 0 and "not measured: eager: RuntimeError: planned\n" in out
    assert "full_prefill: one graph per token bucket" in out


@pytest.mark.parametrize(
    ("routes", "code"),
    [
        (["eager", "full_prefill"], 1),
        (["compiled", "reduce-overhead"], 0),
        (["reduce-overhead"], 1),
        (["reduce-overhead", "pieces"], 1),
        (["eager"], 1),
    ],
)
def test_a_route_that_was_asked_for_and_failed_is_a_failure_and_so_is_nothing_at_all(
    routes: list[str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, body: Any) -> Any:
        raise RuntimeError("planned")

    monkeypatch.setattr(run, "plain_route", broken)
    got, out, _ = fgc(capsys, "--tokens", "8", "--repeats", "3", "--routes", *routes)
    assert got == code and "not measured: " in out


def test_a_route_of_ours_that_was_asked_for_and_failed_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(self: Any) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(run.Ours, "start", broken)
    file = tmp_path / "b.json"
    code, out, _ = fgc(
        capsys, "--tokens", "8", "--repeats", "3", "--routes", "eager", "pieces", "full_prefill", "--json", str(file)
    )
    assert code == 1 and "not measured: the rest of full_prefill: RuntimeError: planned" in out
    assert json.loads(file.read_text())["failed"] == ["full_prefill"]


def test_a_replay_is_timed_by_itself_only_after_a_call_of_its_own_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[int] = []
    replayed: list[int] = []
    call, relaunch = run.Ours.__call__, BodyRunner.relaunch

    def noted(self: run.Ours, ids: torch.Tensor) -> torch.Tensor:
        staged.append(ids.shape[1])
        return call(self, ids)

    def checked(self: BodyRunner, bucket: int) -> Any:
        replayed.append(staged[-1])
        return relaunch(self, bucket)

    monkeypatch.setattr(run.Ours, "__call__", noted)
    monkeypatch.setattr(BodyRunner, "relaunch", checked)
    code, out, err = fgc(capsys, "--tokens", "8", "30", "--repeats", "3", "--random", "2", "--routes", "full_prefill")
    assert code == 0 and "2 calls of random lengths" in out, err
    assert len(replayed) > 2 and replayed == sorted(set(replayed)) and replayed[-1] >= 30


def test_what_was_measured_before_a_failure_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(run, "_random", broken)
    code, out, _ = fgc(capsys, "--tokens", "8", "--repeats", "3", "--random", "2")
    assert code == 0 and "not measured: the rest of full_prefill: RuntimeError: planned" in out
    assert "full_prefill takes at most " in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--plot", "x.pdf"], ["x.pdf must end in .png or .svg"]),
        (["--tokens", "8", "0"], ["--tokens: '0' must be an integer of at least 1"]),
        (["--tokens", "257"], ["--tokens 257: the model takes at most 256 tokens"]),
        (["--repeats", "0"], ["--repeats: '0' must be an integer of at least 1"]),
        (["--random", "-5"], ["--random: '-5' must be an integer of at least 0"]),
        *((["--random-seconds", n], [f"--random-seconds: '{n}' must be a number"]) for n in ("0", "-1", "nan", "x")),
        (["--json", ""], ["--json: it is empty"]),
        (["--plot", ""], ["--plot: it is empty"]),
        (["--attention", "nosuch"], ["invalid choice: 'nosuch'", "auto", "reference"]),
        (["--attention", "varlen"], ["--attention varlen: ", "float32 are auto, reference"]),
        (["--compiler", "inductor"], ["--compiler inductor: ", "aot_eager, eager"]),
        (["--routes", "fast"], ["invalid choice: 'fast'", "full_prefill"]),
        (["gpt-9"], ["no preset"]),
    ],
)
def test_bad_arguments_say_what_is_valid(argv: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = fgc(capsys, *argv)
    assert code == 2 and all(text in err for text in said), err


def test_the_limit_is_reading_the_weights_until_multiplying_takes_longer() -> None:
    limit = Limit(bandwidth=4e12, rate=8e14, weight_bytes=14 * 10**9, weights=7 * 10**9)
    assert limit.ms(1) == limit.ms(100) == pytest.approx(3.5)
    assert limit.ms(2000) == pytest.approx(35.0)


def test_bandwidth_and_rate_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_limit(1000, torch.float32, CPU)
    assert found.weight_bytes == 4000
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.rate < 1e14


def test_the_slowest_against_the_compiled_route_is_named() -> None:
    result = run.Result("m", "x", "float32", Limit(1, 1, 1, 1))
    assert result.slower_than_compiled() is None
    result.times = {"compiled": {8: 10.0, 64: 10.0}, "full_prefill": {8: 2.0, 64: 10.5, 99: 1.0}}
    assert result.slower_than_compiled() == (64, pytest.approx(1.05))


def test_a_body_whose_weights_are_not_known_is_measured_without_a_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "projections", lambda body: 0)
    files = [tmp_path / "b.json", *([tmp_path / "b.svg"] if find_spec("matplotlib") else [])]
    code, out, err = fgc(
        capsys, "--tokens", "8", "--repeats", "3", "--routes", "eager", "full_prefill", "--json", str(files[0]),
        *(["--plot", str(files[1])] if len(files) > 1 else []),
    )  # fmt: skip
    assert code == 0 and "limit:" not in out and "times in ms of a whole call" in out, err
    found = json.loads(files[0].read_text())
    assert found["limit"] is None and found["limit_ms"] == {"8": None} and found["times"]["full_prefill"]["8"] > 0


def test_random_lengths_are_the_same_each_time_and_time_ends_them() -> None:
    lengths = random_lengths(50, 2048)
    assert lengths == random_lengths(50, 2048) and set(lengths) <= set(range(1, 2049))
    seen: list[int] = []
    strides: list[tuple[int, ...]] = []

    def call(ids: torch.Tensor) -> None:
        seen.append(ids.shape[1])
        strides.append(ids.stride())

    beyond = play(call, lengths, lambda n: 0.0, CPU, vocabulary=9, at_most_s=60)
    assert strides == [(n, 1) for n in lengths]  # as the calls that routes were compiled with
    assert seen == lengths and beyond.calls == 50 and beyond.beyond_ms >= 0
    assert play(lambda ids: None, lengths, lambda n: 0.0, CPU, vocabulary=9, at_most_s=0.0).calls == 0
    assert between({10: 1.0, 20: 3.0})(15) == 2.0


def test_a_median_is_of_at_least_three_calls_over_rotating_inputs() -> None:
    seen: list[int] = []
    inputs = [torch.tensor([i]) for i in range(3)]
    assert median_ms(lambda x: seen.append(int(x)), inputs, CPU, repeats=5, at_most_s=0.0, warm=2) >= 0
    assert seen == [0, 1, 0, 1, 2]
