"""`diptych bench ...`: one subcommand for each benchmark."""

from __future__ import annotations

import typer

from diptych.shared.tools.commands import (
    bench_all_reduce,
    bench_experts,
    bench_latency,
    bench_offline,
    bench_prefix_cache,
    bench_quantization,
    bench_round,
    bench_routing,
    bench_scheduling,
    bench_serve,
    bench_speculation,
    bench_startup,
    bench_step,
)

app = typer.Typer(help="Measure the engine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure the engine."""


app.command("step")(bench_step.step)
app.command("round")(bench_round.round_)
app.command("speculation")(bench_speculation.speculation)
app.command("offline")(bench_offline.offline)
app.command("latency")(bench_latency.latency)
app.command("prefix-cache")(bench_prefix_cache.prefix_cache)
app.command("routing")(bench_routing.routing)
app.command("quantization")(bench_quantization.quantization)
app.command("allreduce")(bench_all_reduce.allreduce)
app.command("experts")(bench_experts.experts)
app.command("scheduling")(bench_scheduling.scheduling)
app.command("serve")(bench_serve.serve)
app.command("startup")(bench_startup.startup)
