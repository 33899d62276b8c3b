"""`diptych bench round`: what a round of speculation costs, piece by piece, in plain decode steps."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.commands import bench_run, launch
from shared.commands.options import EngineOptions, integers, spread

if TYPE_CHECKING:
    from shared.bench.round import RoundResult


@spread
def round_(
    *,
    engine: EngineOptions,
    batch: Annotated[str, typer.Option(help="Requests; several numbers separated by commas.")] = "1,8,32",
    context: Annotated[
        str, typer.Option(help="Tokens with KV before the round; several by commas.")
    ] = "1024",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the table has their median.")] = 30,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.")
    ] = None,
) -> None:
    """The time of a round of speculation - draft, verify, accept, tell the drafter - and of a plain decode
    step. Speculate where more tokens are accepted in a round than it costs steps.

    For example: --model Qwen3-8B --speculative eagle3 --speculative-draft-model Qwen3-8B-eagle3
    """
    from shared.bench import report
    from shared.bench.round import check_case, engine_flags, measure_round

    bench_run.check_files(None, output)
    batches, contexts = integers("--batch", batch), integers("--context", context)
    for context_len, batch_size in product(contexts, batches):  # before an engine is started
        check_case(batch_size, context_len)
    flags = bench_run.with_dummy_weights(engine.to_flags())
    llm = launch.start_engine(engine_flags(batches, flags))
    results: list[RoundResult] = []
    for context_len, batch_size in product(contexts, batches):
        print(f"batch {batch_size}, context {context_len}", file=sys.stderr)
        results.append(measure_round(llm, batch_size, context_len, repeats))
    print_results(results)
    if output is not None:
        cases = [asdict(result) | {"ratio": result.ratio} for result in results]
        report.write_json(output, report.header("round") | report.engine_facts(llm) | {"cases": cases})


def print_results(results: list[RoundResult]) -> None:
    from rich.table import Table

    shape = results[0].shape
    title = f"{shape.num_steps} steps, top {shape.top_k}, {shape.num_draft_tokens} nodes; ms"
    table = Table(title=title)
    pieces = list(results[0].pieces)
    for heading in ["batch", "context", "decode", *pieces, "round", "host", "round / decode"]:
        table.add_column(heading, justify="right")
    for result in results:
        times: list[Any] = [result.decode, *result.pieces.values(), result.round, result.host]
        cells = [f"{time * 1e3:.3f}" for time in times]
        table.add_row(str(result.batch_size), str(result.context_len), *cells, f"{result.ratio:.2f}")
    bench_run.console().print(table)
