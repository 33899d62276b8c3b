"""`diptych bench serve`: latency, throughput and goodput of a server under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.bench_offline import parse_range
from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, Plot, make_table, run
from diptych.shared.tools.commands.option_values import integers
from diptych.shared.tools.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from rich.table import Table

    from diptych.shared.tools.bench.serve_client import Outcome
    from diptych.shared.tools.bench.serve_load import Arrivals, LoadResult, Targets
    from diptych.shared.tools.bench.serve_workloads import ServeWorkload

SERVER, WORKLOAD, LOAD, RESULTS = "Server", "Numbers of the workload", "Load", "Results"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


@spread
def serve(
    *,
    engine: EngineOptions,
    url: Annotated[
        str | None, _option(SERVER, "Server to measure. Default: one of its own, with the engine's flags.")
    ] = None,
    served_model_name: Annotated[
        str | None, _option(SERVER, "Model of the requests. Default: the first that the server lists.")
    ] = None,
    api_key: Annotated[str | None, _option(SERVER, "Key of the server.", envvar="DIPTYCH_API_KEY")] = None,
    ignore_eos: Annotated[
        bool, _option(SERVER, "Answers have their full length; a server must know the field ignore_eos.")
    ] = True,
    workload: Annotated[
        str, typer.Option(help="random, shared-prefix, multi-turn, agents or sharegpt.")
    ] = "random",
    num_requests: Annotated[
        int | None, _option(WORKLOAD, "Requests; of multi-turn and agents, conversations.")
    ] = None,
    input_len: Annotated[
        str | None,
        _option(WORKLOAD, "Prompt tokens of a request, about so many in chats: N, or N-M.", metavar="N[-M]"),
    ] = None,
    output_len: Annotated[str | None, _option(WORKLOAD, "Output tokens: N, or N-M.", metavar="N[-M]")] = None,
    groups: Annotated[int | None, _option(WORKLOAD, "Groups that share a prefix (shared-prefix).")] = None,
    group_size: Annotated[int | None, _option(WORKLOAD, "Requests of a group (shared-prefix).")] = None,
    shared_len: Annotated[
        int | None, _option(WORKLOAD, "Tokens that a group shares (shared-prefix).")
    ] = None,
    num_turns: Annotated[
        int | None, _option(WORKLOAD, "Turns of a conversation (multi-turn, agents).")
    ] = None,
    first_len: Annotated[
        str | None, _option(WORKLOAD, "Tokens of the first question (agents): N, or N-M.", metavar="N[-M]")
    ] = None,
    file: Annotated[Path | None, _option(WORKLOAD, "Recorded chats, JSON (sharegpt).")] = None,
    seed: Annotated[int, _option(WORKLOAD, "Of prompts, lengths and arrivals. Default: 0.")] = 0,
    request_rate: Annotated[
        str | None,
        _option(LOAD, "Open loop: arrivals per second (Poisson), or inf; several separated by commas."),
    ] = None,
    concurrency: Annotated[
        str | None,
        _option(LOAD, "Closed loop: concurrent requests; several separated by commas. Default: 8."),
    ] = None,
    temperature: Annotated[float, _option(LOAD, "Of sampling. Default: 0.")] = 0.0,
    warm_ups: Annotated[int, _option(LOAD, "Requests before, which do not count. Default: 2.", min=0)] = 2,
    ttft_target: Annotated[float | None, _option(RESULTS, "Goodput: most milliseconds of TTFT.")] = None,
    tpot_target: Annotated[
        float | None, _option(RESULTS, "Goodput: most milliseconds per output token.")
    ] = None,
    e2e_target: Annotated[float | None, _option(RESULTS, "Goodput: most milliseconds of a request.")] = None,
    plot: Plot = None,
    output: Output = None,
) -> None:
    """Latency, throughput and goodput of a server with OpenAI's API, as its clients see them.

    \b
    random         random token ids of given lengths
    shared-prefix  groups of requests that share the beginning of their prompts
    multi-turn     chats whose history grows
    agents         chats with a long first question, then many short ones
    sharegpt       the first questions of a file of recorded chats
    """
    try:
        from diptych.shared.tools.bench.serve_load import Targets
        from diptych.shared.tools.bench.serve_workloads import SERVE_WORKLOADS
    except ImportError as error:
        raise ImportError(f"this benchmark needs {error.name}: pip install 'diptych[server]'") from None

    arguments = engine.to_arguments()
    if url is not None and arguments:
        raise ValueError(f"{arguments[0]} is a flag of the engine: it does not apply to a server at --url")
    loads = parse_arrivals(request_rate, concurrency)
    chosen = bench_run.make_workload(
        SERVE_WORKLOADS,
        workload,
        {
            "num_requests": num_requests,
            "input_len": parse_range("--input-len", input_len),
            "output_len": parse_range("--output-len", output_len),
            "groups": groups,
            "group_size": group_size,
            "shared_len": shared_len,
            "num_turns": num_turns,
            "first_len": parse_range("--first-len", first_len),
            "file": file,
            "seed": seed,
        },
    )
    benchmark = ServeBenchmark(
        loads,
        chosen,
        {"api_key": api_key, "temperature": temperature, "ignore_eos": ignore_eos},
        Targets(ttft_target, tpot_target, e2e_target),
        warm_ups,
    )
    benchmark.facts = {
        "workload": {"name": chosen.name} | asdict(chosen) | ({"file": str(file)} if file else {}),
        "url": url,
        "engine_arguments": arguments,
        "temperature": temperature,
    }
    if is_shape_name(engine.given.get("model")) and "load_format" not in engine.given:
        arguments += ["--load-format", "dummy"]
    benchmark.server_arguments = arguments
    benchmark.model = served_model_name
    run(benchmark, output=output, plot=plot)


def is_shape_name(model: str | None) -> bool:
    """Whether it is a shape of shared/assets/configs, which gets random weights."""
    from diptych.shared.loading.model_path import is_shape

    return is_shape(model or "")


def parse_arrivals(request_rate: str | None, concurrency: str | None) -> list[Arrivals]:
    """One `Arrivals` for each number of the given option."""
    from diptych.shared.tools.bench.serve_load import Arrivals

    if request_rate is not None and concurrency is not None:
        raise ValueError("--request-rate is an open loop and --concurrency a closed one: give one of them")
    if request_rate is None:
        return [Arrivals(concurrency=each) for each in integers("--concurrency", concurrency or "8")]
    try:
        return [Arrivals(rate=float(each)) for each in request_rate.split(",")]
    except ValueError as error:
        raise ValueError(f"--request-rate takes numbers or inf, separated by commas: {error}") from None


class ServeBenchmark(Benchmark):
    """One result for each load, each from an empty prefix cache if the server allows it."""

    name = "serve"
    server_arguments: list[str]  # of the server to start, if `facts` has no url
    model: str | None

    def __init__(
        self, loads: Sequence[Arrivals], workload: ServeWorkload, settings: dict[str, Any], targets: Targets,
        num_warm_ups: int,
    ) -> None:  # fmt: skip
        super().__init__(loads)
        self.workload = workload
        self.settings = settings
        self.targets = targets
        self.num_warm_ups = num_warm_ups

    def measure(self, progress: bench_run.Progress) -> None:
        with contextlib.ExitStack() as stack:
            url = self.facts["url"]
            if url is None:
                from diptych.shared.tools.bench.serve_process import own_server

                progress.on_run(f"starting a server: diptych serve {' '.join(self.server_arguments)}")
                url = stack.enter_context(own_server(self.server_arguments))
            asyncio.run(self.measure_loads(url, progress))

    async def measure_loads(self, url: str, progress: bench_run.Progress) -> None:
        from diptych.shared.tools.bench.serve_client import Client
        from diptych.shared.tools.bench.serve_load import LoadResult, run_load

        async with Client(url, **self.settings) as client:
            await client.connect(self.model)
            conversations = self.workload.conversations(await client.vocab_size())
            num_turns = sum(len(conversation) for conversation in conversations)
            for conversation in conversations[: self.num_warm_ups]:
                async for outcome in client.run(conversation[:1]):
                    if outcome.error is not None:
                        raise ValueError(f"the first request fails: {outcome.error}")
            for arrivals in self.cases:
                result = LoadResult(arrivals, self.targets, await client.flush_cache())
                self.results.append(result)
                bar = progress.on_run(f"{arrivals.name}: {num_turns} requests", None)

                def on_outcome(outcome: Outcome, result: LoadResult = result, bar: Any = bar) -> None:
                    if bar is not None:
                        bar(sum(each.num_output_tokens for each in result.outcomes))

                await run_load(client, conversations, result, self.workload.seed, on_outcome)

    def complete(self) -> list[LoadResult]:
        return [result for result in self.results if result.outcomes]

    def table(self, results: list[LoadResult]) -> Table:
        """A table with one column for each load."""
        from diptych.shared.tools.bench.serve_load import METRICS

        columns = [Column("", lambda row: row[0], is_text=True), *map(load_column, results)]
        rows: list[tuple[str, Callable[[LoadResult], str | None]]] = [
            ("requests/s", lambda result: f"{result.request_rate:.2f}"),
            ("goodput, requests/s", lambda result: f"{result.goodput:.2f}"),
            ("output tokens/s", lambda result: f"{result.output_rate:,.0f}"),
            ("hit rate", lambda result: f"{result.hit_rate:.1%}"),
            ("failed", lambda result: str(len(result.outcomes) - len(result.good))),
        ]
        has_turns = any(result.values("later_ttft") for result in results)
        for metric in (*METRICS, "later_ttft") if has_turns else METRICS:
            for name in ("mean", "p50", "p90", "p99", "max"):
                label = metric.upper().replace("LATER_", "later turns: ")
                rows.append((f"{label} {name}, ms", summary_cell(metric, name)))
        return make_table(columns, rows)

    def notes(self, results: list[LoadResult]) -> Iterator[str]:
        for result in results:
            yield from (f"{result.arrivals.name}: {error}" for error in result.as_json()["errors"])

    def draw(self, file: Path, results: list[LoadResult]) -> None:
        from diptych.shared.tools.bench.serve_plot import plot_loads

        plot_loads(file, f"{self.workload.name}: {self.facts['url'] or 'diptych serve'}", results)


def load_column(result: LoadResult) -> Column:
    return Column(result.arrivals.name, lambda row: row[1](result))


def summary_cell(metric: str, name: str) -> Callable[[LoadResult], str]:
    def text(result: LoadResult) -> str:
        summary = result.summary(metric)
        return "–" if summary is None else f"{summary[name]:,.1f}"

    return text
