"""What `diptych bench offline` prints, writes and draws."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.commands import bench_run

if TYPE_CHECKING:
    from rich.console import Console

    from shared.bench.long_prompts import LongPromptsResult
    from shared.bench.offline import CaseResult
    from shared.bench.yardstick import Row
    from shared.commands.offline_measurement import Measurement


def finish(
    measurement: Measurement,
    data: dict[str, Any],
    *,
    trace: Path | None,
    plot: Path | None,
    output: Path | None,
) -> None:
    """Of the results, those that have at least one complete repeat."""
    from shared.bench.long_prompts import LongPromptsResult
    from shared.bench.offline import CaseResult
    from shared.bench.report import write_json

    console = bench_run.console()
    cases = [(r, facts) for r, facts in measurement.results if isinstance(r, CaseResult) and r.runs]
    windows = [
        (r, facts) for r, facts in measurement.results if isinstance(r, LongPromptsResult) and r.repeats
    ]
    if not cases and not windows:
        console.print("interrupted before the first repeat was complete")
    data["results"] = [result.as_json() | facts for result, facts in cases]
    data["results"] += [result.as_json() | facts for result, facts in windows]
    row = None
    if cases:
        print_cases(console, [result for result, _ in cases])
        row = yardstick_row(measurement, data)
        if row is not None:
            data["yardstick"] = compare(console, cases[0][0].speed, row)
    for window, _ in windows:
        print_windows(console, window)
    if output is not None:  # the numbers first: what fails below does not take them along
        write_json(output, data)
        print(f"written to {output}")
    if measurement.results:
        bench_run.save_trace(trace, measurement.results[-1][0].recording)
    if plot is not None and cases:
        draw_cases(plot, measurement, [result for result, _ in cases], row, cases[0][1])
    if plot is not None:
        for window, facts in windows:
            draw_windows(plot, window, facts)


def print_cases(console: Console, results: list[CaseResult]) -> None:
    from rich.table import Table

    table = Table("requests", "tokens/s (median)", "min", "max", "first token, ms", "from the cache")
    table.add_column("idle between steps")
    for result in results:
        first, ideal = result.time_to_first_token, result.ideal_hit_rate
        table.add_row(
            result.label,
            f"{result.speed:,.1f}",
            f"{min(result.speeds):,.1f}",
            f"{max(result.speeds):,.1f}",
            "" if first is None else f"{first * 1000:.1f}",
            f"{result.hit_rate:.1%}" + ("" if ideal is None else f" (ideal {ideal:.1%})"),
            bench_run.idle_text(result.idle),
        )
    console.print(table)
    for result in results:
        if result.limit is not None:
            limit = result.limit.tokens_per_second
            console.print(
                f"{result.label}: {result.speed / limit:.2f} of limit "
                f"({limit:,.0f} tokens/s, from what was measured here)"
            )
    by_label = {result.label.rpartition(", ")[2]: result.speed for result in results}
    if len(by_label) == 2 and "with radix cache" in by_label:
        gain = by_label["with radix cache"] / by_label["without radix cache"]
        console.print(f"{gain:.2f} times the throughput with the radix cache")
    num_retractions = sum(run.num_retractions for result in results for run in result.runs)
    if num_retractions:
        console.print(f"{num_retractions} retractions: the KV pool was short")


def yardstick_row(measurement: Measurement, data: dict[str, Any]) -> Row | None:
    """The row to compare with, where workload, shape, type and GPU are the table's."""
    from shared.bench.workloads import Offline256
    from shared.bench.yardstick import row_for

    facts = data["results"][0]
    if measurement.workload != Offline256():
        return None
    return row_for(facts["flags"]["model"], facts["dtype"], data["machine"]["gpus"])


def compare(console: Console, speed: float, row: Row) -> dict[str, Any]:
    engine, best = row.best_offline()
    console.print(
        f"{speed / row.offline_limit:.2f} of limit ({row.offline_limit:,.0f} in the table), "
        f"{speed / best:.2f} of best peer ({engine}: {best:,.0f})"
    )
    return {
        "limit_tokens_per_s": row.offline_limit,
        "of_limit": speed / row.offline_limit,
        "best_peer": engine,
        "best_peer_tokens_per_s": best,
        "of_best_peer": speed / best,
    }


def print_windows(console: Console, result: LongPromptsResult) -> None:
    from rich.table import Table

    table = Table(
        "long prompts", "gaps p50, ms", "p90", "p99", "longest", "arrivals", "their first token, ms"
    )
    for name, title in (("without", "none"), ("with_arrivals", "arriving")):
        windows = [getattr(repeat, name) for repeat in result.repeats]
        cells = [title]
        for field in ("p50", "p90", "p99", "longest"):
            cells.append(f"{statistics.median(getattr(w.spread, field) for w in windows) * 1000:.2f}")
        waits = [wait for window in windows for wait in window.times_to_first_token]
        cells.append(str(sum(window.num_arrivals for window in windows)))
        cells.append(f"{statistics.median(waits) * 1000:.1f}" if waits else "")
        table.add_row(*cells)
    console.print(table)
    console.print(f"p99 with arrivals is {result.p99_ratio:.2f} times that without")
    if result.idle is not None:
        console.print(f"idle between steps: {bench_run.idle_text(result.idle)}")


def draw_cases(
    file: Path, measurement: Measurement, results: list[CaseResult], row: Row | None, facts: dict[str, Any]
) -> None:
    from shared.bench.plots import plot_speeds
    from shared.bench.yardstick import ENGINES

    marks: dict[str, float] = {}
    if row is not None:
        marks["limit"] = row.offline_limit
        marks |= {engine: speed for engine, speed in zip(ENGINES, row.offline) if speed is not None}
    elif len(results) == 1 and results[0].limit is not None:
        marks["limit"] = results[0].limit.tokens_per_second
    title = f"{measurement.workload.name}: {facts['flags']['model']} on {facts['flags']['device']}"
    plot_speeds(file, title, {result.label: result.speeds for result in results}, marks)


def draw_windows(file: Path, result: LongPromptsResult, facts: dict[str, Any]) -> None:
    from shared.bench.plots import plot_gaps

    def seconds(name: str) -> list[float]:
        return [gap.seconds for repeat in result.repeats for gap in getattr(repeat, name).gaps]

    title = f"long-prompts: {facts['flags']['model']} on {facts['flags']['device']}"
    plot_gaps(file, title, {"without": seconds("without"), "with long prompts": seconds("with_arrivals")})
