"""`diptych bench routing`: simulated hit rate and balance of the router's policies."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shared.commands import bench_run


def routing(
    replicas: Annotated[int, typer.Option(min=1, help="Servers behind the router.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations.")] = 400,
    turns: Annotated[int, typer.Option(min=1, help="Requests of a conversation.")] = 4,
    groups: Annotated[int, typer.Option(min=1, help="System prompts; each conversation has one.")] = 32,
    cache_chars: Annotated[int, typer.Option(min=1, help="Characters in the cache of a server.")] = 100_000,
    rate: Annotated[float, typer.Option(help="Conversations that begin in a second.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.")
    ] = None,
) -> None:
    """Simulate `diptych route` on conversations with shared system prompts. No model runs."""
    try:
        from shared.bench.routing import RoutingCase, policies, simulate
    except ImportError as error:
        raise ImportError(f"the router needs {error.name}: pip install 'diptych[server]'") from None
    from rich.console import Console
    from rich.table import Table

    from shared.bench import report

    bench_run.check_files(None, output)
    case = RoutingCase(
        num_replicas=replicas,
        num_conversations=conversations,
        num_turns=turns,
        num_groups=groups,
        cache_chars=cache_chars,
        rate=rate,
        seed=seed,
    )
    results = [simulate(case, name, policy) for name, policy in policies().items()]
    table = Table(title=f"{conversations * turns} simulated requests on {replicas} servers")
    for heading in ("policy", "hit rate", "mean load", "max load", "requests per server"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for result in results:
        table.add_row(
            result.policy,
            f"{result.hit_rate:.1%}",
            f"{result.mean_load:.1f}",
            str(result.max_load),
            f"{min(result.num_sent)}-{max(result.num_sent)}",
        )
    Console(width=None if sys.stdout.isatty() else bench_run.WIDTH).print(table)
    if output is not None:
        rows = [asdict(result) for result in results]
        report.write_json(output, report.header("routing") | {"case": asdict(case), "results": rows})
