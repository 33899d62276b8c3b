"""`diptych bench serve`: latency, throughput and goodput of a server under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.commands import bench_run
from shared.commands.bench_offline import parse_range
from shared.commands.options import EngineOptions, integers, spread

if TYPE_CHECKING:
    from shared.bench.serve_client import Outcome
    from shared.bench.serve_load import Arrivals, LoadResult, Targets
    from shared.bench.serve_workloads import ServeWorkload

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
    workload: Annotated[str, typer.Option(help="random, shared-prefix, multi-turn or sharegpt.")] = "random",
    num_requests: Annotated[int | None, _option(WORKLOAD, "Requests; of multi-turn, conversations.")] = None,
    input_len: Annotated[
        str | None,
        _option(
            WORKLOAD, "Prompt tokens of a request, about so many in multi-turn: N, or N-M.", metavar="N[-M]"
        ),
    ] = None,
    output_len: Annotated[str | None, _option(WORKLOAD, "Output tokens: N, or N-M.", metavar="N[-M]")] = None,
    groups: Annotated[int | None, _option(WORKLOAD, "Groups that share a prefix (shared-prefix).")] = None,
    group_size: Annotated[int | None, _option(WORKLOAD, "Requests of a group (shared-prefix).")] = None,
    shared_len: Annotated[
        int | None, _option(WORKLOAD, "Tokens that a group shares (shared-prefix).")
    ] = None,
    num_turns: Annotated[int | None, _option(WORKLOAD, "Turns of a conversation (multi-turn).")] = None,
    file: Annotated[Path | None, _option(WORKLOAD, "Recorded chats, JSON (sharegpt).")] = None,
    seed: Annotated[int, _option(WORKLOAD, "Of prompts, lengths and arrivals. Default: 0.")] = 0,
    request_rate: Annotated[
        str | None,
        _option(LOAD, "Open loop: arrivals per second (Poisson), or inf; several separated by commas."),
    ] = None,
    concurrency: Annotated[
        str | None, _option(LOAD, "Closed loop: requests at once; several separated by commas. Default: 8.")
    ] = None,
    temperature: Annotated[float, _option(LOAD, "Of sampling. Default: 0.")] = 0.0,
    warm_ups: Annotated[int, _option(LOAD, "Requests before, which do not count. Default: 2.", min=0)] = 2,
    ttft_target: Annotated[float | None, _option(RESULTS, "Goodput: most milliseconds of TTFT.")] = None,
    tpot_target: Annotated[
        float | None, _option(RESULTS, "Goodput: most milliseconds per output token.")
    ] = None,
    e2e_target: Annotated[float | None, _option(RESULTS, "Goodput: most milliseconds of a request.")] = None,
    plot: Annotated[Path | None, _option(RESULTS, "Draw the results into this file (.svg, .png).")] = None,
    output: Annotated[
        Path | None, _option(RESULTS, "Write everything to this JSON file.", "--output", "-o")
    ] = None,
) -> None:
    """Latency, throughput and goodput of a server with OpenAI's API, as its clients see them.

    \b
    random         random token ids of given lengths
    shared-prefix  groups of requests that share the beginning of their prompts
    multi-turn     chats whose history grows
    sharegpt       the first questions of a file of recorded chats
    """
    try:
        from shared.bench.serve_load import Targets
        from shared.bench.serve_workloads import SERVE_WORKLOADS
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
            "file": file,
            "seed": seed,
        },
    )
    bench_run.check_files(plot, output)

    from shared.bench import report

    data = report.header("serve") | {
        "workload": {"name": chosen.name} | asdict(chosen) | ({"file": str(file)} if file else {}),
        "url": url,
        "engine_arguments": arguments,
        "temperature": temperature,
    }
    results: list[LoadResult] = []
    with bench_run.Progress() as progress, contextlib.ExitStack() as stack:
        if url is None:
            from shared.bench.serve_process import own_server

            if is_shape_name(engine.model) and engine.load_format is None:
                arguments += ["--load-format", "dummy"]
            progress.on_run(f"starting a server: diptych serve {' '.join(arguments)}")
            url = stack.enter_context(own_server(arguments))
        settings = {"api_key": api_key, "temperature": temperature, "ignore_eos": ignore_eos}
        targets = Targets(ttft_target, tpot_target, e2e_target)
        measuring = measure(
            url, served_model_name, settings, chosen, loads, targets, seed, warm_ups, results, progress
        )
        asyncio.run(measuring)
    data["is_interrupted"] = progress.is_interrupted
    finish([result for result in results if result.outcomes], data, plot=plot, output=output)
    if progress.is_interrupted:
        raise typer.Exit(130)  # as a shell reports an interrupted program


def is_shape_name(model: str | None) -> bool:
    """A name of shared/assets/configs: it gets random weights."""
    from shared.loading.model_path import is_shape

    return is_shape(model or "")


def parse_arrivals(request_rate: str | None, concurrency: str | None) -> list[Arrivals]:
    """One for each number of the option that was given."""
    from shared.bench.serve_load import Arrivals

    if request_rate is not None and concurrency is not None:
        raise ValueError("--request-rate is an open loop and --concurrency a closed one: give one of them")
    if request_rate is None:
        return [Arrivals(concurrency=each) for each in integers("--concurrency", concurrency or "8")]
    try:
        return [Arrivals(rate=float(each)) for each in request_rate.split(",")]
    except ValueError as error:
        raise ValueError(f"--request-rate takes numbers or inf, separated by commas: {error}") from None


async def measure(
    url: str, model: str | None, settings: dict[str, Any], workload: ServeWorkload,
    loads: Sequence[Arrivals], targets: Targets, seed: int, num_warm_ups: int, results: list[LoadResult],
    progress: bench_run.Progress,
) -> None:  # fmt: skip
    """A result for each load, each from an empty prefix cache where the server allows it."""
    from shared.bench.serve_client import Client
    from shared.bench.serve_load import LoadResult, run_load

    async with Client(url, **settings) as client:
        await client.connect(model)
        conversations = workload.conversations(await client.vocab_size())
        num_turns = sum(len(conversation) for conversation in conversations)
        for conversation in conversations[:num_warm_ups]:
            async for outcome in client.run(conversation[:1]):
                if outcome.error is not None:
                    raise ValueError(f"the first request fails: {outcome.error}")
        for arrivals in loads:
            result = LoadResult(arrivals, targets, await client.flush_cache())
            results.append(result)
            bar = progress.on_run(f"{arrivals.name}: {num_turns} requests", None)

            def on_outcome(outcome: Outcome, result: LoadResult = result, bar: Any = bar) -> None:
                if bar is not None:
                    bar(sum(each.num_output_tokens for each in result.outcomes))

            await run_load(client, conversations, result, seed, on_outcome)


def finish(
    results: list[LoadResult], data: dict[str, Any], *, plot: Path | None, output: Path | None
) -> None:
    from shared.bench.report import write_json

    if not results:
        bench_run.console().print("interrupted before the first answer")
    else:
        print_results(results)
    data["results"] = [result.as_json() for result in results]
    if output is not None:
        write_json(output, data)
        print(f"written to {output}")
    if plot is not None and results:
        from shared.bench.serve_plot import plot_loads

        plot_loads(plot, f"{data['workload']['name']}: {data['url'] or 'diptych serve'}", results)


def print_results(results: list[LoadResult]) -> None:
    """A column for each load."""
    from rich.table import Table

    from shared.bench.serve_load import METRICS

    table = Table("", *(result.arrivals.name for result in results))
    table.add_row("requests/s", *(f"{result.request_rate:.2f}" for result in results))
    table.add_row("goodput, requests/s", *(f"{result.goodput:.2f}" for result in results))
    table.add_row("output tokens/s", *(f"{result.output_rate:,.0f}" for result in results))
    table.add_row("hit rate", *(f"{result.hit_rate:.1%}" for result in results))
    table.add_row("failed", *(str(len(result.outcomes) - len(result.good)) for result in results))
    for metric in METRICS:
        table.add_section()
        summaries = [result.summary(metric) for result in results]
        for name in ("mean", "p50", "p90", "p99", "max"):
            cells = ["–" if each is None else f"{each[name]:,.1f}" for each in summaries]
            table.add_row(f"{metric.upper()} {name}, ms", *cells)
    console = bench_run.console()
    console.print(table)
    for result in results:
        for error in result.as_json()["errors"]:
            console.print(f"{result.arrivals.name}: {error}")
