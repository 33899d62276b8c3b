"""`diptych bench latency`: how soon and how evenly tokens come, against a bare step and the limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.commands import bench_run, launch
from shared.commands.options import EngineOptions, integers, spread

if TYPE_CHECKING:
    from rich.console import Console

    from shared.bench.latency import LatencyResult, Streams
    from shared.bench.step_cost import Ceilings
    from shared.bench.yardstick import Row


@spread
def latency(
    *,
    engine: EngineOptions,
    concurrency: Annotated[
        str, typer.Option(help="Streams at once; several numbers separated by commas.")
    ] = "1",
    input_len: Annotated[int, typer.Option(help="Prompt tokens of a stream.")] = 512,
    output_len: Annotated[int, typer.Option(help="Output tokens of a stream.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; the table shows medians.")] = 3,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before, which do not count.")] = 1,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Of the prompts and of sampling.")] = 0,
    bare_step: Annotated[
        bool | None,
        typer.Option(
            "--step/--no-step",
            help="Measure the bare step too, and what the engine adds. Default: on a GPU.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[bool, typer.Option(help="Measure what the device can do, and compare with it.")] = True,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline of one more run of the last number to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the gaps into this file (.svg, .png).")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.")
    ] = None,
) -> None:
    """Time to the first token, gaps between the others, and time for each output token, through the whole
    engine, from an empty prefix cache, with random prompts and without an end of sequence."""
    from shared.bench.latency import Streams

    cases = [
        Streams(number, input_len, output_len, temperature, seed)
        for number in integers("--concurrency", concurrency)
    ]
    bench_run.check_files(plot, trace, output)
    flags = bench_run.with_dummy_weights(engine.to_flags())

    from shared.bench import report

    data: dict[str, Any] = report.header("latency") | {
        "temperature": temperature,
        "seed": seed,
        "num_repeats": repeats,
        "num_warm_ups": warm_ups,
    }
    results: list[LatencyResult] = []
    with bench_run.Progress() as progress:
        ceilings = bench_run.ceilings_of(flags) if limit else None
        llm = launch.start_engine(flags)
        data |= report.engine_facts(llm)
        if ceilings is not None:
            data["ceilings"] = report.ceilings_as_json(ceilings)
        has_step = llm.config.device != "cpu" if bare_step is None else bare_step
        for case in cases:
            measure_case(llm, case, results, ceilings, progress, repeats, warm_ups, has_step)
    data["is_interrupted"] = progress.is_interrupted
    finish(results, data, trace=trace, plot=plot, output=output)
    if progress.is_interrupted:
        raise typer.Exit(130)  # as a shell reports an interrupted program


def measure_case(
    llm: Any, streams: Streams, results: list[LatencyResult], ceilings: Ceilings | None,
    progress: bench_run.Progress, num_repeats: int, num_warm_ups: int, has_step: bool,
) -> None:  # fmt: skip
    """Its result is in the list from the beginning: an interrupt leaves what was complete."""
    from shared.bench import latency as bench
    from shared.bench.limit import stream_limit

    result = bench.LatencyResult(streams)
    results.append(result)
    if ceilings is not None:
        dtype = llm.assembly.kv_pool.dtype
        result.limit = stream_limit(
            llm.model_config, streams.concurrency, streams.mean_context_len, dtype, ceilings
        )
    bench.measure(
        llm, result, num_repeats=num_repeats, num_warm_ups=num_warm_ups, on_run=progress.on_run
    )  # fmt: skip
    if has_step:
        progress.on_run(f"{streams.concurrency} at once: the bare step")
        result.step_time = bench.measure_step(llm, streams)


def finish(
    results: list[LatencyResult], data: dict[str, Any], *, trace: Path | None, plot: Path | None,
    output: Path | None,
) -> None:  # fmt: skip
    from shared.bench.report import write_json

    console = bench_run.console()
    complete = [result for result in results if result.runs]
    data["results"] = [result.as_json() for result in complete]
    if not complete:
        console.print("interrupted before the first repeat was complete")
    else:
        print_results(console, complete)
        row = yardstick_row(complete[0], data)
        if row is not None:
            data["yardstick"] = compare(console, complete[0].time_per_token, row)
    if output is not None:  # the numbers first: what fails below does not take them along
        write_json(output, data)
        print(f"written to {output}")
    if complete:
        bench_run.save_trace(trace, results[-1].recording)
        if plot is not None:
            draw(plot, complete, data)


def print_results(console: Console, results: list[LatencyResult]) -> None:
    from rich.table import Table

    table = Table("at once", "first token, ms", "ms a token", "gaps p50", "p90", "p99", "longest")
    for heading in ("bare step, ms", "engine adds", "idle between steps"):
        table.add_column(heading)
    for result in results:
        table.add_row(
            str(result.streams.concurrency),
            f"{result.time_to_first_token * 1000:.2f}",
            f"{result.time_per_token * 1000:.3f}",
            *(f"{result.gap(name) * 1000:.3f}" for name in ("p50", "p90", "p99", "longest")),
            "" if result.step_time is None else f"{result.step_time * 1000:.3f}",
            "" if result.overhead is None else f"{result.overhead:+.1%}",
            bench_run.idle_text(result.idle),
        )
    console.print(table)
    for result in results:
        if result.limit is not None:
            console.print(
                f"{result.streams.concurrency} at once: {result.limit / result.time_per_token:.2f} of limit "
                f"({result.limit * 1000:.3f} ms, from what was measured here)"
            )


def yardstick_row(result: LatencyResult, data: dict[str, Any]) -> Row | None:
    """The row to compare with, where stream, shape, type and GPU are the table's."""
    from shared.bench import yardstick

    streams = result.streams
    lengths = (streams.input_len, streams.output_len)
    if streams.concurrency != 1 or lengths != (yardstick.STREAM_INPUT_LEN, yardstick.STREAM_OUTPUT_LEN):
        return None
    return yardstick.row_for(data["flags"]["model"], data["dtype"], data["machine"]["gpus"])


def compare(console: Console, time_per_token: float, row: Row) -> dict[str, Any]:
    """In speed: above 1 is better than the peer."""
    engine, best = row.best_stream()
    ms = time_per_token * 1000
    console.print(
        f"{row.stream_limit / ms:.2f} of limit ({row.stream_limit} ms in the table), {best / ms:.2f} of best "
        f"peer ({engine}: {best} ms)"
    )
    return {
        "limit_ms": row.stream_limit,
        "of_limit": row.stream_limit / ms,
        "best_peer": engine,
        "best_peer_ms": best,
        "of_best_peer": best / ms,
    }


def draw(file: Path, results: list[LatencyResult], data: dict[str, Any]) -> None:
    from shared.bench.plots import plot_gaps

    title = f"latency: {data['flags']['model']} on {data['flags']['device']}"
    gaps = {
        f"{result.streams.concurrency} at once": [gap.seconds for run in result.runs for gap in run.gaps]
        for result in results
    }
    plot_gaps(file, title, gaps)
