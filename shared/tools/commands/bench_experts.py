"""`diptych bench experts`: simulated balance of experts over ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, run

if TYPE_CHECKING:
    from diptych.shared.tools.bench.experts import ExpertsResult


def experts(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share the experts.")] = 8,
    num_experts: Annotated[int, typer.Option("--experts", min=1, help="Experts of a layer.")] = 128,
    redundant: Annotated[int, typer.Option(min=0, help="Places for replicas in a layer.")] = 16,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 32,
    balancer: Annotated[str, typer.Option(help="Implementation of expert_balancer.")] = "reference",
    seed: Annotated[int, typer.Option(help="Seed of the loads.")] = 0,
    output: Output = None,
) -> None:
    """Simulate the load of ranks: experts in order, balanced, and with replicas. No model runs."""
    from diptych.shared.tools.bench.experts import ExpertsCase, placements

    case = ExpertsCase(layers, num_experts, redundant, ranks, seed)
    results = {result.placement: result for result in placements(case, balancer)}
    benchmark = ExpertsBenchmark(list(results), results.__getitem__)
    benchmark.title = f"{num_experts} experts on {ranks} ranks, {layers} layers: busiest rank / mean of ranks"
    benchmark.facts["case"] = asdict(case)
    run(benchmark, output=output)


class ExpertsBenchmark(Benchmark):
    name = "experts"
    columns = (
        Column("placement", lambda result: result.placement, is_text=True),
        Column("physical experts", lambda result: str(result.num_physical)),
        Column("median layer", lambda result: f"{result.median:.2f}"),
        Column("worst layer", lambda result: f"{result.worst:.2f}"),
    )

    def as_json(self, result: ExpertsResult) -> dict[str, Any]:
        return asdict(result)
