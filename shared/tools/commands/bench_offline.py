"""`diptych bench offline`: throughput of the whole engine, by workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.benchmark import PANEL, Bound, Output, Plot, Repeats, Trace, WarmUps, run
from diptych.shared.tools.commands.offline_benchmark import (
    EnginesBenchmark,
    LongPromptsBenchmark,
    OfflineBenchmark,
)
from diptych.shared.tools.commands.option_values import integers
from diptych.shared.tools.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from diptych.shared.tools.bench.workloads import Workload

NUMBERS = "Numbers of the workload"


def _number(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=NUMBERS, show_default=False, **more)


@spread
def offline(
    *,
    engine: EngineOptions,
    workload: Annotated[
        str, typer.Option(help="offline-256, shared-prefix, long-prompts or uniform.")
    ] = "uniform",
    num_requests: Annotated[int | None, _number("Requests (offline-256, long-prompts).")] = None,
    concurrency: Annotated[
        str | None, _number("Concurrent requests; several runs separated by commas (uniform).")
    ] = None,
    input_len: Annotated[
        str | None, _number("Prompt tokens of a request, of its own: N, or N-M.", metavar="N[-M]")
    ] = None,
    output_len: Annotated[str | None, _number("Output tokens: N, or N-M.", metavar="N[-M]")] = None,
    groups: Annotated[int | None, _number("Groups that share a prefix (shared-prefix).")] = None,
    group_size: Annotated[int | None, _number("Requests of a group (shared-prefix).")] = None,
    shared_len: Annotated[int | None, _number("Tokens that a group shares (shared-prefix).")] = None,
    long_len: Annotated[int | None, _number("Tokens of a long prompt (long-prompts).")] = None,
    long_output_len: Annotated[int | None, _number("Output tokens behind one (long-prompts).")] = None,
    interval: Annotated[float | None, _number("Seconds between long prompts (long-prompts).")] = None,
    seconds: Annotated[float | None, _number("Of measuring, each time (long-prompts).")] = None,
    temperature: Annotated[float | None, _number("0: greedy.")] = None,
    seed: Annotated[int | None, _number("Of prompts, lengths and sampling. Default: 0.")] = None,
    scale_tp: Annotated[
        str | None,
        typer.Option(
            help="In place of --tp, 1,2: measure an engine of each number of ranks, and compare (uniform, "
            "offline-256).",
            metavar="N,N,...",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    repeats: Repeats = 3,
    warm_ups: WarmUps = 1,
    limit: Bound = True,
    trace: Trace = None,
    plot: Plot = None,
    output: Output = None,
) -> None:
    """Throughput of the whole engine, from an empty prefix cache, with random prompts and without an end of
    sequence: against the roofline bound and, on the table's GPU, against other engines.

    \b
    offline-256    256 requests of 100 to 1,024 prompt tokens, and as many of output
    shared-prefix  64 groups of 16 requests that share 2,048 tokens, with and without the cache
    long-prompts   inter-token latency of 32 requests while prompts of 8,192 tokens arrive
    uniform        requests of equal lengths, several numbers of them
    """
    chosen = make_workload(
        workload,
        {
            "num_requests": num_requests,
            "concurrency": None if concurrency is None else integers("--concurrency", concurrency),
            "input_len": parse_range("--input-len", input_len),
            "output_len": parse_range("--output-len", output_len),
            "groups": groups,
            "group_size": group_size,
            "shared_len": shared_len,
            "long_len": long_len,
            "long_output_len": long_output_len,
            "interval": interval,
            "seconds": seconds,
            "temperature": temperature,
            "seed": seed,
        },
    )
    flags = bench_run.with_dummy_weights(engine.to_flags())
    tp_sizes = tp_sizes_of(scale_tp, chosen.name, flags)
    benchmark: EnginesBenchmark
    if chosen.name == "long-prompts":
        benchmark = LongPromptsBenchmark(chosen, flags, repeats, warm_ups)
    else:
        benchmark = OfflineBenchmark(chosen, flags, repeats, warm_ups, has_bound=limit, tp_sizes=tp_sizes)
    run(benchmark, output=output, plot=plot, trace=trace)


def make_workload(name: str, numbers: dict[str, Any]) -> Workload:
    from diptych.shared.tools.bench.workloads import WORKLOADS

    return bench_run.make_workload(WORKLOADS, name, numbers)


def tp_sizes_of(text: str | None, workload: str, flags: dict[str, Any]) -> tuple[int, ...]:
    """The numbers of ranks of --scale-tp."""
    if text is None:
        return ()
    sizes = integers("--scale-tp", text)
    if workload not in ("uniform", "offline-256"):
        raise ValueError(f"--scale-tp compares uniform and offline-256; the workload is {workload}")
    if "tp" in flags:
        raise ValueError(f"give --scale-tp {text} or --tp {flags['tp']}, not both")
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise ValueError(f"--scale-tp takes distinct numbers of at least 1, got {text!r}")
    return sizes


def parse_range(option: str, text: str | None) -> tuple[int, int] | None:
    """ "100-1024", or "32" for 32-32."""
    if text is None:
        return None
    least, separator, greatest = text.partition("-")
    try:
        return int(least), int(greatest if separator else least)
    except ValueError:
        raise ValueError(f"{option} takes a number or two with - between them, got {text!r}") from None
