"""`diptych bench latency`: TTFT and inter-token latency, against a bare step and the roofline bound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run, launch
from diptych.shared.tools.commands.benchmark import (
    Benchmark,
    Bound,
    Column,
    Output,
    Plot,
    Repeats,
    Trace,
    WarmUps,
    bound_note,
    ms,
    run,
)
from diptych.shared.tools.commands.option_values import integers
from diptych.shared.tools.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from diptych.shared.tools.bench.latency import LatencyResult, Streams


@spread
def latency(
    *,
    engine: EngineOptions,
    concurrency: Annotated[
        str, typer.Option(help="Concurrent streams; several numbers separated by commas.")
    ] = "1",
    input_len: Annotated[int, typer.Option(help="Prompt tokens of a stream.")] = 512,
    output_len: Annotated[int, typer.Option(help="Output tokens of a stream.")] = 128,
    repeats: Repeats = 3,
    warm_ups: WarmUps = 1,
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
    limit: Bound = True,
    trace: Trace = None,
    plot: Plot = None,
    output: Output = None,
) -> None:
    """TTFT, inter-token latency (ITL) and time per output token of streams through the whole engine, from an
    empty prefix cache, with random prompts and without an end of sequence."""
    from diptych.shared.tools.bench.latency import Streams

    cases = [
        Streams(number, input_len, output_len, temperature, seed)
        for number in integers("--concurrency", concurrency)
    ]
    flags = bench_run.with_dummy_weights(engine.to_flags())
    benchmark = LatencyBenchmark(cases, flags, repeats, warm_ups, bare_step, limit)
    run(benchmark, output=output, plot=plot, trace=trace)


def itl_of(name: str, heading: str) -> Column:
    return Column(heading, lambda result: ms(result.itl(name)))


class LatencyBenchmark(Benchmark):
    name = "latency"
    columns = (
        Column("concurrency", lambda result: str(result.streams.concurrency)),
        Column("TTFT, ms", lambda result: ms(result.time_to_first_token, 2)),
        Column("ms a token", lambda result: ms(result.time_per_token)),
        *(itl_of(name, f"ITL {name}") for name in ("p50", "p90", "p99", "max")),
        Column("bare step, ms", lambda result: ms(result.step_time)),
        Column("engine adds", lambda result: None if result.overhead is None else f"{result.overhead:+.1%}"),
        Column("idle between steps", lambda result: bench_run.idle_text(result.idle)),
    )

    def __init__(
        self, cases: list[Streams], flags: dict[str, Any], num_repeats: int, num_warm_ups: int,
        has_step: bool | None, has_bound: bool,
    ) -> None:  # fmt: skip
        """`has_step`: measure the bare step too; None: only on a GPU."""
        super().__init__(cases)
        self.flags = flags
        self.has_step = has_step
        self.has_bound = has_bound
        self.facts = {
            "temperature": cases[0].temperature,
            "seed": cases[0].seed,
            "num_repeats": num_repeats,
            "num_warm_ups": num_warm_ups,
        }

    def measure(self, progress: bench_run.Progress) -> None:
        from diptych.shared.tools.bench import latency, result_header
        from diptych.shared.tools.bench.step import check_flags
        from diptych.shared.tools.bench.step_cost import is_one_engine, of_rank
        from diptych.shared.tools.bench.workload_bound import stream_bound

        if self.has_step:
            check_flags(self.flags)
        ceilings = bench_run.ceilings_of(self.flags) if self.has_bound else None
        llm = launch.start_llm(self.flags)
        if self.has_step is None:
            self.has_step = llm.config.device != "cpu" and is_one_engine(llm.config)
        repeats = {name: self.facts[name] for name in ("num_repeats", "num_warm_ups")}
        self.facts |= result_header.engine_facts(llm)
        if ceilings is not None:
            self.facts["ceilings"] = result_header.ceilings_as_json(ceilings)
        for case in self.cases:
            result = latency.LatencyResult(case)
            self.results.append(result)
            if ceilings is not None:
                dtype, kv_dtype = llm.assembly.dtype, llm.assembly.kv_pool.dtype
                sizes = case.concurrency, case.mean_context_len
                config, rates = of_rank(llm.config, llm.model_config, ceilings)
                result.bound = stream_bound(config, *sizes, dtype, rates, kv_dtype)
            latency.measure(llm, result, on_run=progress.on_run, **repeats)
            if self.has_step:
                progress.on_run(f"concurrency {case.concurrency}: the bare step")
                result.step_time = latency.measure_step(llm, case)

    def complete(self) -> list[LatencyResult]:
        return [result for result in self.results if result.runs]

    def notes(self, results: list[LatencyResult]) -> Iterator[str]:
        from diptych.shared.tools.bench import peers

        for result in results:
            if result.bound is not None:
                label = f"concurrency {result.streams.concurrency}"
                share = result.bound / result.time_per_token
                yield bound_note(label, share, f"{result.bound * 1000:.3f} ms")
        streams = results[0].streams
        shape = (streams.concurrency, streams.input_len, streams.output_len)
        one_gpu = self.facts["flags"]["tp"] == self.facts["flags"]["dp"] == 1
        if one_gpu and shape == (1, peers.STREAM_INPUT_LEN, peers.STREAM_OUTPUT_LEN):
            row = peers.row_for(self.facts["flags"]["model"], self.facts["dtype"])
            if row is not None:
                comparison = row.compare_stream(results[0].time_per_token * 1000)
                self.facts["peers"] = comparison._asdict()
                yield str(comparison)

    def draw(self, file: Path, results: list[LatencyResult]) -> None:
        from diptych.shared.tools.bench import plots

        itl = {
            f"concurrency {result.streams.concurrency}": [
                interval.seconds for run in result.runs for interval in run.intervals
            ]
            for result in results
        }
        plots.plot_itl(
            file, f"latency: {self.facts['flags']['model']} on {self.facts['flags']['device']}", itl
        )
