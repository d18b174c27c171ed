"""The bench as a table, as JSON and as a picture."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from fullgraph_compile.bench.names import MEANING, ROUTES
from fullgraph_compile.bench.output import Output
from fullgraph_compile.bench.run import Result


def print_result(result: Result, console: Output) -> None:
    """Times by token count, then start-up, memory, random lengths, and what was not measured."""
    routes = [r for r in ROUTES if result.times.get(r)]
    table = Table("tokens", "limit", *routes, "over limit", "host", "bucket", "padding")
    for column in table.columns:
        column.justify = "right"
    for n in result.sizes:
        table.add_row(
            str(n), _ms(result.limit_ms(n)), *(_ms(result.times[r].get(n)) for r in routes), *_rest(result, n)
        )
    console.print(f"{result.model}, {result.dtype}, one request; {result.machine}")
    known = ""
    if (limit := result.limit) is not None:
        known = (
            f"limit: {limit.weight_bytes / 1e9:.2f} GB of weights at {limit.bandwidth / 1e9:.0f} GB/s, or "
            f"{limit.rate / 1e9:.0f} Gflop/s, both measured here; "
        )
    console.print(f"{known}times in ms of a whole call, median")
    if result.sizes:
        console.print(table)
    for route in routes:
        took = f" (start-up {result.start_up[route]:.1f} s)" if route in result.start_up else ""
        console.print(f"  {route}: {MEANING[route]}{took}")
    if (slowest := result.slower_than_compiled()) is not None:
        tokens, ratio = slowest
        console.print(f"  full_prefill takes at most {ratio:.2f} of compiled, at {tokens} tokens")
    if result.memory_bytes:
        console.print(f"  graphs and all that getting ready took: {result.memory_bytes / 2**20:.0f} MiB")
    for route, beyond in result.random.items():
        console.print(
            f"  {beyond.calls} calls of random lengths, {route}: {beyond.total_s:.2f} s, {beyond.beyond_ms:.3f} ms a "
            f"call beyond the replays themselves ({beyond.replays_s:.2f} s)",
        )
    for line in result.not_measured:
        console.print(f"  not measured: {line}")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _rest(result: Result, n: int) -> tuple[str, str, str, str]:
    ours = result.times.get("full_prefill", {}).get(n)
    limit = result.limit_ms(n)
    bucket = result.buckets.get(n)
    return (
        "" if ours is None or limit is None else f"{ours / limit:.2f}x",
        f"{result.host[n]:.3f}" if n in result.host else "",
        ("" if n not in result.buckets else "none") if bucket is None else str(bucket),
        "" if bucket is None else f"{1 - n / bucket:.0%}",
    )


def plot(result: Result, path: str) -> None:
    """Draw times by token count, on logarithmic axes, with the limit.

    Args:
        result: one in which at least one call was timed.
        path: the file to write; the ending says the format: .png or .svg.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for route in (r for r in ROUTES if result.times.get(r)):
        times = sorted(result.times[route].items())
        ours: dict[str, Any] = {"linewidth": 2.5, "zorder": 3} if route == "full_prefill" else {"linewidth": 1.3}
        axes.plot([n for n, _ in times], [ms for _, ms in times], marker="o", markersize=4, label=route, **ours)
    sizes = result.sizes
    if result.limit is not None:
        axes.plot(sizes, [result.limit.ms(n) for n in sizes], "k--", linewidth=1, label="limit of the machine")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(n) for n in sizes], rotation=45)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("tokens of the call")
    axes.set_ylabel("ms a call")
    axes.set_title(f"{result.model}, {result.dtype}\n{result.machine}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
