"""`diptych bench serve`: latency, throughput and goodput of a server under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
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

    from diptych.shared.tools.bench.serve_client import Client, Outcome
    from diptych.shared.tools.bench.serve_load import Arrivals, LoadResult, Targets
    from diptych.shared.tools.bench.serve_workloads import ServeWorkload

NO_CACHE = "--disable-radix-cache"
NUM_ALONE = 5
"""Cold prompts of the new tokens of a turn, after one that does not count."""
WARM_UP_SEED = 2**40
"""Added to the seed for warm-ups: their prompts are not those of a load, whose cache may not be flushed."""

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
    cache_off: Annotated[
        str | None,
        _option(
            SERVER,
            "Loads to measure again without a prefix cache, on a second server that starts after the first.",
            metavar="N,N",
        ),
    ] = None,
    cache_off_url: Annotated[
        str | None, _option(SERVER, "With --url: the server without a prefix cache, for --cache-off.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="random, shared-prefix, multi-turn, agents or sharegpt.")
    ] = "random",
    num_requests: Annotated[
        int | None,
        _option(
            WORKLOAD,
            "Requests; of multi-turn and agents, conversations. Default of agents: the concurrency of each "
            "load, or 16 with --request-rate.",
        ),
    ] = None,
    input_len: Annotated[
        str | None,
        _option(
            WORKLOAD,
            "Prompt tokens of a request, about so many in chats; of a tool's result (agents): N, or N-M.",
            metavar="N[-M]",
        ),
    ] = None,
    output_len: Annotated[str | None, _option(WORKLOAD, "Output tokens: N, or N-M.", metavar="N[-M]")] = None,
    groups: Annotated[int | None, _option(WORKLOAD, "Groups that share a prefix (shared-prefix).")] = None,
    group_size: Annotated[int | None, _option(WORKLOAD, "Requests of a group (shared-prefix).")] = None,
    shared_len: Annotated[
        int | None, _option(WORKLOAD, "Tokens that a group shares (shared-prefix).")
    ] = None,
    num_turns: Annotated[
        int | None,
        _option(WORKLOAD, "Turns of a conversation (multi-turn), or behind its first one (agents)."),
    ] = None,
    first_len: Annotated[
        str | None, _option(WORKLOAD, "Tokens of the first prompt (agents): N, or N-M.", metavar="N[-M]")
    ] = None,
    think_time: Annotated[
        float | None, _option(WORKLOAD, "Seconds from an answer to the next turn (agents).")
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
    agents         chats with a long first prompt, then results of tools
    sharegpt       the first questions of a file of recorded chats
    """
    try:
        from diptych.shared.tools.bench.serve_load import Targets
        from diptych.shared.tools.bench.serve_workloads import SERVE_WORKLOADS, Agents
    except ImportError as error:
        raise ImportError(f"this benchmark needs {error.name}: pip install 'diptych[server]'") from None

    arguments = engine.to_arguments()
    if url is not None and arguments:
        raise ValueError(f"{arguments[0]} is a flag of the engine: it does not apply to a server at --url")
    loads = parse_arrivals(request_rate, concurrency)
    loads_off = parse_cache_off(cache_off, cache_off_url, url, arguments, request_rate is not None)
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
            "think_time": think_time,
            "file": file,
            "seed": seed,
        },
    )
    if isinstance(chosen, Agents) and num_requests is None and request_rate is None:
        chosen = replace(chosen, num_requests=max(each.concurrency or 1 for each in [*loads, *loads_off]))
    benchmark = ServeBenchmark(
        loads,
        chosen,
        {"api_key": api_key, "temperature": temperature, "ignore_eos": ignore_eos},
        Targets(ttft_target, tpot_target, e2e_target),
        warm_ups,
    )
    benchmark.loads_off = loads_off
    benchmark.is_cut = num_requests is None and isinstance(chosen, Agents)
    benchmark.facts = {
        "workload": {"name": chosen.name} | asdict(chosen) | ({"file": str(file)} if file else {}),
        "url": url,
        "cache_off_url": cache_off_url,
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


def parse_cache_off(
    loads: str | None, off_url: str | None, url: str | None, arguments: list[str], is_open: bool
) -> list[Arrivals]:
    """The loads of the server without a prefix cache."""
    if off_url is not None and (loads is None or url is None):
        raise ValueError("--cache-off-url needs --url and --cache-off")
    if loads is None:
        return []
    if url is not None and off_url is None:
        raise ValueError("--cache-off with --url needs --cache-off-url: a server without a prefix cache")
    if NO_CACHE in arguments:
        raise ValueError(f"{NO_CACHE} leaves --cache-off nothing to compare with: give one of them")
    return parse_arrivals(loads, None) if is_open else parse_arrivals(None, loads)


class ServeBenchmark(Benchmark):
    """One result for each load, each from an empty prefix cache if the server allows it."""

    name = "serve"
    loads_off: Sequence[Arrivals] = ()  # for a server without a prefix cache
    is_cut = False  # a load has at most as many conversations as its concurrency
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
        url, off_url = self.facts["url"], self.facts["cache_off_url"]
        if off_url is not None:
            asyncio.run(self.connect(url, off_url))
        for loads, given, more in ((self.cases, url, []), (self.loads_off, off_url, [NO_CACHE])):
            if not loads:
                continue
            with contextlib.ExitStack() as stack:
                if given is None:
                    from diptych.shared.tools.bench.serve_process import own_server

                    arguments = [*self.server_arguments, *more]
                    progress.on_run(f"starting a server: diptych serve {' '.join(arguments)}")
                    given = stack.enter_context(own_server(arguments))
                asyncio.run(self.measure_loads(given, loads, progress))

    async def connect(self, *urls: str) -> None:
        """Raise `ValueError` unless all servers answer."""
        from diptych.shared.tools.bench.serve_client import Client

        for url in urls:
            async with Client(url, **self.settings) as client:
                await client.connect(self.model)

    async def measure_loads(self, url: str, loads: Sequence[Arrivals], progress: bench_run.Progress) -> None:
        from diptych.shared.tools.bench.serve_client import Client
        from diptych.shared.tools.bench.serve_load import LoadResult, run_load

        async with Client(url, **self.settings) as client:
            await client.connect(self.model)
            vocab_size = await client.vocab_size()
            conversations = self.workload.conversations(vocab_size)
            warm_ups = replace(self.workload, seed=self.workload.seed + WARM_UP_SEED)
            for conversation in warm_ups.conversations(vocab_size)[: self.num_warm_ups]:
                async for outcome in client.run(conversation[:2]):
                    if outcome.error is not None:
                        raise ValueError(f"the first request fails: {outcome.error}")
            for arrivals in loads:
                result = LoadResult(arrivals, self.targets, await client.flush_cache())
                result.has_cache = loads is self.cases
                self.results.append(result)
                chosen = conversations[: arrivals.concurrency] if self.is_cut else conversations
                bar = progress.on_run(f"{result.name}: {sum(map(len, chosen))} requests", None)

                def on_outcome(outcome: Outcome, result: LoadResult = result, bar: Any = bar) -> None:
                    if bar is not None:
                        bar(sum(each.num_output_tokens for each in result.outcomes))

                await run_load(client, chosen, result, self.workload.seed, on_outcome)
                result.alone = await time_alone(client, result.new_len, vocab_size, len(self.results))

    def complete(self) -> list[LoadResult]:
        return [result for result in self.results if result.outcomes]

    def table(self, results: list[LoadResult]) -> Table:
        """A table with one column for each load."""
        from diptych.shared.tools.bench.serve_rows import rows

        columns = [Column("", lambda row: row[0], is_text=True), *map(load_column, results)]
        return make_table(columns, rows(results))

    def notes(self, results: list[LoadResult]) -> Iterator[str]:
        for result in results:
            yield from (f"{result.name}: {error}" for error in result.as_json()["errors"])
            if result.has_cache and not result.is_flushed:
                yield f"{result.name}: the server does not flush its prefix cache; these prompts may be in it"

    def draw(self, file: Path, results: list[LoadResult]) -> None:
        from diptych.shared.tools.bench.serve_plot import plot_loads, plot_turns

        draw = plot_turns if self.workload.name == "agents" else plot_loads
        draw(file, f"{self.workload.name}: {self.facts['url'] or 'diptych serve'}", results)


async def time_alone(client: Client, length: int | None, vocab_size: int, seed: int) -> list[float]:
    """The TTFT of cold prompts of that length, one after the other; nothing if it is None."""
    from diptych.shared.tools.bench.serve_workloads import RandomPrompts

    if length is None:
        return []
    await client.flush_cache()
    prompts = RandomPrompts(1 + NUM_ALONE, (length, length), (1, 1), seed).conversations(vocab_size)
    outcomes = [outcome for prompt in prompts async for outcome in client.run(prompt)]
    return [outcome.time_to_first_token for outcome in outcomes[1:] if outcome.error is None]


def load_column(result: LoadResult) -> Column:
    return Column(result.name, lambda row: row[1](result))
