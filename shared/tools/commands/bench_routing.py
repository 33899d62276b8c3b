"""`diptych bench routing`: simulated hit rate and balance of the router's policies."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, run

if TYPE_CHECKING:
    from diptych.shared.tools.bench.router_simulation import RoutingResult


def routing(
    replicas: Annotated[int, typer.Option(min=1, help="Servers behind the router.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations.")] = 400,
    turns: Annotated[int, typer.Option(min=1, help="Requests of a conversation.")] = 4,
    groups: Annotated[int, typer.Option(min=1, help="System prompts; each conversation has one.")] = 32,
    cache_chars: Annotated[int, typer.Option(min=1, help="Characters in the cache of a server.")] = 100_000,
    rate: Annotated[float, typer.Option(help="Conversations that begin in a second.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 0,
    output: Output = None,
) -> None:
    """Simulate `diptych route` on conversations with shared system prompts. No model runs."""
    try:
        from diptych.shared.tools.bench.router_simulation import RoutingCase, policies, simulate
    except ImportError as error:
        raise ImportError(f"the router needs {error.name}: pip install 'diptych[server]'") from None
    case = RoutingCase(
        num_replicas=replicas,
        num_conversations=conversations,
        num_turns=turns,
        num_groups=groups,
        cache_chars=cache_chars,
        rate=rate,
        seed=seed,
    )
    benchmark = RoutingBenchmark(list(policies().items()), lambda policy: simulate(case, *policy))
    benchmark.title = f"{conversations * turns} simulated requests on {replicas} servers"
    benchmark.facts["case"] = asdict(case)
    run(benchmark, output=output)


class RoutingBenchmark(Benchmark):
    name = "routing"
    columns = (
        Column("policy", lambda result: result.policy, is_text=True),
        Column("hit rate", lambda result: f"{result.hit_rate:.1%}"),
        Column("mean load", lambda result: f"{result.mean_load:.1f}"),
        Column("max load", lambda result: str(result.max_load)),
        Column("requests per server", lambda result: f"{min(result.num_sent)}-{max(result.num_sent)}"),
    )

    def as_json(self, result: RoutingResult) -> dict[str, Any]:
        return asdict(result)
