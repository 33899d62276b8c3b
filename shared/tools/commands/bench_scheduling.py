"""`diptych bench scheduling`: CPU time of scheduling one step, by number of waiting requests."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, Plot, ms, run
from diptych.shared.tools.commands.option_values import integers, names_among

if TYPE_CHECKING:
    from rich.console import RenderableType

    from diptych.shared.tools.bench.scheduling import SchedulingResult


def scheduling(
    waiting: Annotated[
        str, typer.Option(help="Waiting requests; several numbers separated by commas.")
    ] = "10,100,1000,10000",
    policy: Annotated[str, typer.Option(help="Policies separated by commas. Default: all.")] = "",
    panel: Annotated[str, typer.Option(help="Panels separated by commas.")] = "reference,optimized",
    running: Annotated[int, typer.Option(min=1, help="Running requests.")] = 256,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 1,
    adapters: Annotated[int, typer.Option(min=0, help="LoRA adapters; each request has one of them.")] = 0,
    cached: Annotated[int, typer.Option(min=0, help="Tokens of other prompts in the radix cache.")] = 0,
    grammars: Annotated[bool, typer.Option("--grammars", help="Every second request has one.")] = False,
    seconds: Annotated[float, typer.Option(help="Processor time for each case.")] = 2.0,
    plot: Plot = None,
    output: Output = None,
) -> None:
    """CPU time of a step's pass over the queue: the policy, the prefill adder, the queue. In each step one
    request arrives and one is admitted; no model runs."""
    from diptych.shared import registry
    from diptych.shared.tools.bench.scheduling import POLICIES, SchedulingCase, measure

    policies = names_among("--policy", policy or ",".join(POLICIES), POLICIES)
    panels = names_among("--panel", panel, registry.PANELS)
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds must be finite and more than 0, got {seconds}")
    cases = [  # make all cases before measuring, because making a case checks it
        SchedulingCase(side, name, number, running, page_size, adapters, cached, grammars)
        for number in integers("--waiting", waiting)
        for name in policies
        for side in panels
    ]
    run(SchedulingBenchmark(cases, lambda case: measure(case, seconds)), output=output, plot=plot)


class SchedulingBenchmark(Benchmark):
    name = "scheduling"
    title = "processor time of a step's scheduling, ms"
    columns = (
        Column("policy", lambda result: result.case.policy, is_text=True),
        Column("panel", lambda result: result.case.panel, is_text=True),
        Column("waiting", lambda result: f"{result.case.num_waiting:,}"),
        Column("least", lambda result: ms(result.least)),
        Column("median", lambda result: ms(result.median)),
        Column("first pass", lambda result: ms(result.first_pass)),
    )

    def table(self, results: list[SchedulingResult]) -> RenderableType:
        return super().table(
            sorted(results, key=lambda one: (one.case.policy, one.case.panel, one.case.num_waiting))
        )

    def as_json(self, result: SchedulingResult) -> dict[str, Any]:
        blocks = {"num_blocks": len(result.blocks), "least_s": result.least, "median_s": result.median}
        return asdict(result.case) | {"first_pass_s": result.first_pass} | blocks

    def draw(self, file: Path, results: list[SchedulingResult]) -> None:
        from diptych.shared.tools.bench import plots

        points = [
            (f"{result.case.policy}, {result.case.panel}", result.case.num_waiting, result.least * 1e3)
            for result in results
        ]
        plots.plot_growth(file, "scheduling of a step", points, "waiting requests", "ms of processor time")
