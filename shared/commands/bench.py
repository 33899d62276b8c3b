"""`diptych bench ...`: one subcommand for each benchmark."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.commands import bench_step, launch
from shared.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from shared.bench.offline import Result

app = typer.Typer(help="Measure the engine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure the engine."""


app.command("step")(bench_step.step)


@app.command("offline")
@spread
def offline(
    *,
    engine: EngineOptions,
    concurrency: Annotated[
        str, typer.Option(help="Requests at once; several runs separated by commas.")
    ] = "1,16",
    input_len: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens of a request.")] = 128,
    repeats: Annotated[int, typer.Option(help="Measurements of each; the table shows their median.")] = 3,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the prompts and of sampling.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.")
    ] = None,
) -> None:
    """Tokens per second of one streamed request and of many at once, with distinct random prompts, a
    flushed prefix cache and no end-of-sequence; and the share of a step spent outside model and sampler."""
    from shared.bench.offline import Workload, measure, report

    workload = Workload(
        concurrency=parse_concurrency(concurrency),
        input_len=input_len,
        output_len=output_len,
        num_repeats=repeats,
        temperature=temperature,
        seed=seed,
    )
    llm = launch.start_engine(engine.to_flags())
    results = measure(llm, workload, lambda what: print(what, file=sys.stderr))
    print_table(results)
    if output is not None:
        output.write_text(json.dumps(report(llm, workload, results), indent=2) + "\n", encoding="utf-8")
        print(f"written to {output}")


def parse_concurrency(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--concurrency takes numbers separated by commas, got {text!r}") from None


def print_table(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        *(
            "requests at once",
            "tokens/s (median)",
            "min",
            "max",
            "first token, ms",
            "outside model and sampler",
        )
    )
    for result in results:
        first = result.time_to_first_token
        table.add_row(
            str(result.concurrency),
            f"{statistics.median(result.speeds):.1f}",
            f"{min(result.speeds):.1f}",
            f"{max(result.speeds):.1f}",
            "" if first is None else f"{first * 1000:.1f}",
            f"{result.steps.outside_share:.1%} of {result.steps.num_steps} steps",
        )
    Console().print(table)
