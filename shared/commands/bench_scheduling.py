"""`diptych bench scheduling`: CPU time of scheduling one step, by number of waiting requests."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.commands import bench_run
from shared.commands.options import integers, names_among

if TYPE_CHECKING:
    from shared.bench.scheduling import SchedulingResult


def scheduling(
    waiting: Annotated[
        str, typer.Option(help="Waiting requests; several numbers separated by commas.")
    ] = "10,100,1000,10000",
    policy: Annotated[str, typer.Option(help="Policies separated by commas. Default: all.")] = "",
    panel: Annotated[str, typer.Option(help="Panels separated by commas.")] = "reference,optimized",
    running: Annotated[int, typer.Option(min=1, help="Running requests.")] = 256,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 1,
    seconds: Annotated[float, typer.Option(help="Processor time for each case.")] = 2.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the growth into this file (.svg, .png).")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.")
    ] = None,
) -> None:
    """Processor time of a step's pass over the queue: the policy, the prefill adder, the queue. In each step
    one request arrives and one is admitted; no model runs."""
    from shared import registry
    from shared.bench import report
    from shared.bench.plots import plot_growth
    from shared.bench.scheduling import POLICIES, SchedulingCase, measure

    bench_run.check_files(plot, output)
    policies = names_among("--policy", policy or ",".join(POLICIES), POLICIES)
    panels = names_among("--panel", panel, registry.PANELS)
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds must be finite and more than 0, got {seconds}")
    cases = [  # all of them before the first is measured: each is checked when it is made
        SchedulingCase(side, name, number, running, page_size)
        for number in integers("--waiting", waiting)
        for name in policies
        for side in panels
    ]
    results: list[SchedulingResult] = []
    for case in cases:
        print(f"{case.panel}, {case.policy}, {case.num_waiting} waiting", file=sys.stderr)
        results.append(measure(case, seconds))
    print_results(results)
    if output is not None:
        rows = [
            asdict(result.case) | {"first_pass_s": result.first_pass, "blocks_s": result.blocks}
            for result in results
        ]
        report.write_json(output, report.header("scheduling") | {"results": rows})
    if plot is not None:
        lines: dict[str, list[tuple[float, float]]] = {}
        for result in results:
            line = lines.setdefault(f"{result.case.policy}, {result.case.panel}", [])
            line.append((result.case.num_waiting, result.least * 1e3))
        plot_growth(plot, "scheduling of a step", lines, "waiting requests", "ms of processor time")


def print_results(results: list[SchedulingResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="processor time of a step's scheduling, ms")
    for heading in ("policy", "panel", "waiting", "least", "median", "first pass"):
        table.add_column(heading, justify="left" if heading in ("policy", "panel") else "right")
    for result in sorted(results, key=lambda one: (one.case.policy, one.case.panel, one.case.num_waiting)):
        case = result.case
        times = (result.least, result.median, result.first_pass)
        table.add_row(
            case.policy, case.panel, f"{case.num_waiting:,}", *(f"{time * 1e3:.3f}" for time in times)
        )
    Console(width=None if sys.stdout.isatty() else bench_run.WIDTH).print(table)
