"""The ladder is decided at the first capture: by a forecast of memory, and by timings where that was asked for."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import Reason, fitting
from fullgraph_compile.forecast import peak_bytes
from fullgraph_compile.graphs.tape import TapeRecorder
from fullgraph_compile.ladder_costs import Timing
from tests.runtime.bodies import both_ways, check, check_replayed, compiled, replays, run, runners, small

MEASURED: dict[str, Any] = {"buckets": "measured", "max_tokens": 64}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Replays that take a second up to 24 tokens and two above; the compiled route takes 1.5."""
    timed: dict[str, list[int]] = {"replay": [], "exact": []}

    def seconds(call: Any, device: torch.device) -> float:
        call()
        if call.func.__name__ == "exact":
            timed["exact"].append(call.args[1].tokens)
            return 1.5
        timed["replay"].append(call.args[0])
        return 1.0 if call.args[0] <= 24 else 2.0

    monkeypatch.setattr(fitting, "seconds", seconds)
    return timed


def test_a_measured_ladder_has_the_sizes_that_pay_and_the_rest_runs_compiled(clock: dict[str, Any]) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, **MEASURED)
    check(body, eager, 5, 7)
    report = fgc.report(body)
    assert report.buckets == (24,)
    assert sorted(clock["replay"]) == [8, 16, 24, 32, 48, 64]
    assert set(clock["exact"]) == {1, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49, 64}
    check_replayed(body, eager, 3, 24)
    check(body, eager, 40)
    assert fgc.report(body).fallbacks[Reason.CROSSOVER] == 1
    check(body, eager, 65)
    assert fgc.report(body).fallbacks[Reason.OVER_LADDER] == 1
    assert "graphs pay up to 24 tokens" in str(fgc.report(body))
    assert report.ladder is not None and report.ladder.buckets == (24,)
    assert "above 24 tokens the compiled route is taken" in str(report)


def test_it_is_measured_once_and_kept_over_a_release(clock: dict[str, Any]) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, **MEASURED)
    run(body, 5)
    timed = len(clock["replay"])
    fgc.release(body)
    check_replayed(body, eager, 5, 20)
    assert len(clock["replay"]) == timed and fgc.report(body).buckets == (24,)


def test_real_timings_choose_some_ladder_and_every_call_is_right() -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, buckets="measured", max_tokens=24, lengths={5: 2, 20: 1})
    check(body, eager, 5, 20, 24, 1)
    ladder = fgc.report(body).ladder
    assert ladder is not None and [t.tokens for t in ladder.timings] == [8, 16, 24]
    assert all(t.replay > 0 and t.compiled > 0 and t.compiled_low > 0 for t in ladder.timings)


def test_a_bucket_is_left_for_the_compiled_route_where_that_was_measured_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = (Timing(8, 1.0, 2.0, 2.0), Timing(64, 4.0, 6.4, 0.9))  # equal at 40 tokens or so
    monkeypatch.setattr(fitting, "_measure", lambda *args: found)
    module = small()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, **MEASURED)
    check_replayed(body, eager, 8, 64)
    assert fgc.report(body).buckets == (8, 64)
    before = replays(body)
    check(body, eager, 10)
    assert replays(body) == before and fgc.report(body).fallbacks[Reason.CROSSOVER] == 1
    check_replayed(body, eager, 60)


@both_ways
def test_at_the_budget_the_largest_buckets_are_left_out_and_the_report_and_the_log_say_so(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = small()
    eager = copy.deepcopy(module)
    free = compiled(way, copy.deepcopy(module), buckets=[8, 16, 64], memory_budget="1GiB")
    run(free, 5), run(free, 6)
    assert fgc.report(free).buckets == (8, 16, 64) and not fgc.report(free).cut
    needed = fgc.report(free).forecast_bytes
    assert needed > 0
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "fullgraph_compile"):
        body = compiled(way, module, buckets=[8, 16, 64], memory_budget=needed - 1)
        run(body, 5), run(body, 6)
    report = fgc.report(body)
    assert report.buckets == (8, 16)
    assert 0 < report.forecast_bytes < needed
    assert "left out 64" in report.cut and "left out 64" in str(report) and "left out 64" in caplog.text
    check_replayed(body, eager, 5, 16)
    check(body, eager, 17)
    assert fgc.report(body).fallbacks[Reason.MEMORY] == 1


def test_what_a_budget_leaves_untimed_is_said_with_the_share_of_the_calls_that_have_no_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitting, "seconds", lambda call, device: 2.0 if call.func.__name__ == "exact" else 1.0)
    options = {"buckets": "measured", "max_tokens": 256, "lengths": {8: 1, 250: 97, 999: 2}}
    free = compiled("compile", small(), **options)
    run(free, 5)
    ladder = fgc.report(free).ladder
    assert ladder is not None and ladder.buckets == (8, 256) and not fgc.report(free).cut
    assert ladder.beyond == ((999, 0.02),)
    torch._dynamo.reset()
    body = compiled("compile", small(), **options, memory_budget=fgc.report(free).forecast_bytes // 2)
    run(body, 5)
    report = fgc.report(body)
    assert report.ladder is not None and report.ladder.buckets == (8,) and report.ladder.untimed[-1] == 256
    told = " ".join(str(report).split())
    assert "lengths of 250 tokens, 97.0% of the calls" in told and "lengths of 999 tokens, 2.0% of the calls" in told
    first = report.ladder.untimed[0]
    assert f"256 were not timed, as a graph of {first} alone takes" in report.cut and "1 are left" in report.cut
    assert "forecast to take" not in report.cut


def test_a_budget_for_nothing_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, memory_budget=1)
    check(body, eager, 5, 7)
    report = fgc.report(body)
    assert report.ready and report.buckets == () and report.fallbacks[Reason.MEMORY] == 2
    assert "none is left" in report.cut


def test_measuring_captures_no_more_at_once_than_the_budget_holds(
    clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    record = TapeRecorder.record

    def counting(self: TapeRecorder, fn: Any) -> Any:
        nonlocal most
        graph = record(self, fn)
        most = max(most, len(self.tapes))
        return graph

    monkeypatch.setattr(TapeRecorder, "record", counting)
    free = compiled("compile", small(), **MEASURED)
    run(free, 5)
    assert most == 6
    one = fgc.report(free).forecast_bytes
    torch._dynamo.reset()
    most = 0
    body = compiled("compile", small(), **MEASURED, memory_budget=one + 5000)
    run(body, 5)
    assert most < 6 and fgc.report(body).buckets == (24,)


def test_a_forecast_that_fails_leaves_the_ladder_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("planned")

    monkeypatch.setattr(fitting, "forecast", broken)
    module = small()
    eager = copy.deepcopy(module)
    body = compiled("compile", module, memory_budget="1GiB")
    run(body, 5)
    assert "planned" in caplog.text
    check_replayed(body, eager, 7, 12)


def test_the_forecast_is_near_what_the_tape_holds() -> None:
    body = compiled("compile", small(), buckets=[8, 16, 64], memory_budget="1GiB")
    run(body, 5)
    (runner,) = runners(body)
    (graphs,) = runner._sets
    rows, fixed = graphs.static_bytes()
    assert rows * 64 == sum(t.nbytes for t in (*graphs.buckets[64].inputs.values(), *graphs.buckets[64].outputs))
    assert fixed == 0
    args = runner_args(body)
    with torch.no_grad():
        peak = peak_bytes(graphs.run_of(graphs.buckets[64], args), torch.device("cpu"))
    # Rows, the metadata, and 4 KiB for each call of a graph are what is left.
    nodes = sum(b.graph.nodes * 4096 for b in graphs.buckets.values())
    forecast = fgc.report(body).forecast_bytes
    assert peak + rows * 64 + nodes <= forecast * 1.1
    assert forecast <= 1.3 * (peak + rows * 64 + nodes)


def test_a_bucket_cannot_run_on_the_metadata_of_another() -> None:
    body = compiled("compile", small(), buckets=[8, 16])
    run(body, 5)
    (runner,) = runners(body)
    graphs, args = runner._sets[0], runner_args(body)
    with torch.no_grad():
        first = graphs.run_of(graphs.buckets[8], args)
        first()
        second = graphs.run_of(graphs.buckets[16], args)
        with pytest.raises(RuntimeError, match="another bucket was staged after bucket 8, before its run"):
            first()
        second()


def runner_args(body: Any) -> list[Any]:
    from fullgraph_compile.compiled_body import compiled_body
    from tests.models import tokens

    found = compiled_body(body)
    assert found is not None
    (variants,) = found.forms.variants.values()
    return variants[0].arguments({"input_ids": tokens(5)[None], "position_ids": torch.arange(5)[None]})


def test_the_meter_counts_what_is_alive_at_once() -> None:
    def run() -> None:
        a = torch.empty(1000)
        b = a + 1
        del a
        c = b.view(10, 100) + 1  # the view is no memory of its own
        del b
        c.add_(1)

    assert peak_bytes(run, torch.device("cpu")) == 8000
