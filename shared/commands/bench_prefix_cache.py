"""`diptych bench prefix-cache`: what a match, an insert and an eviction cost, by what is in the tree."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.commands import bench_run
from shared.commands.options import integers, names_among

if TYPE_CHECKING:
    from shared.bench.prefix_cache import CacheResult


def prefix_cache(
    tokens: Annotated[
        str, typer.Option(help="Cached tokens, up to whole sequences; several separated by commas.")
    ] = "10000,100000,1000000,10000000",
    sequence_len: Annotated[str, typer.Option(help="Tokens of a sequence; several by commas.")] = "1024",
    depth: Annotated[str, typer.Option(help="Nodes of a sequence; several by commas.")] = "1",
    page_size: Annotated[str, typer.Option(help="Tokens of a page; several by commas.")] = "1,16",
    panel: Annotated[str, typer.Option(help="Panels separated by commas.")] = "reference,optimized",
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each kind.")] = 300,
    plot: Annotated[Path | None, typer.Option(help="Draw the growth into this file (.svg, .png).")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.")
    ] = None,
) -> None:
    """Processor time of a call of the prefix cache, in trees of the given sizes: all combinations."""
    from shared import registry
    from shared.bench import report
    from shared.bench.plots import plot_growth
    from shared.bench.prefix_cache import OPERATIONS, CacheCase, measure

    bench_run.check_files(plot, output)
    panels = names_among("--panel", panel, registry.PANELS)
    sizes = product(
        integers("--page-size", page_size),
        integers("--depth", depth),
        integers("--sequence-len", sequence_len),
        integers("--tokens", tokens),
        panels,
    )
    cases = [  # all of them before the first is measured: each is checked when it is made
        CacheCase(side, number, length, num_nodes, page) for page, num_nodes, length, number, side in sizes
    ]
    results: list[CacheResult] = []
    for case in cases:
        print(
            f"{case.panel}: {case.num_cached_tokens} tokens, {case.sequence_len} a sequence, "
            f"{case.depth} deep, page {case.page_size}",
            file=sys.stderr,
        )
        results.append(measure(case, repeats))
    print_results(results)
    if output is not None:
        rows = [
            asdict(result.case)
            | {"num_cached_tokens": result.case.num_cached_tokens, "times_s": result.times}
            for result in results
        ]
        report.write_json(output, report.header("prefix-cache") | {"results": rows})
    if plot is not None:
        lines: dict[str, list[tuple[float, float]]] = {}
        for result in results:
            case = result.case
            for operation in OPERATIONS:
                line = lines.setdefault(f"{operation}, page {case.page_size}, {case.panel}", [])
                line.append((case.num_cached_tokens, result.median(operation) * 1e6))
        plot_growth(plot, "a call of the prefix cache", lines, "cached tokens", "us of processor time")


def print_results(results: list[CacheResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    from shared.bench.prefix_cache import OPERATIONS

    table = Table(title="processor time of a call, us: least / median")
    for heading in ("panel", "page", "depth", "sequence", "cached tokens", *OPERATIONS):
        table.add_column(heading, justify="left" if heading == "panel" else "right")
    for result in results:
        case = result.case
        sizes = (case.page_size, case.depth, case.sequence_len, case.num_cached_tokens)
        times = [f"{result.least(name) * 1e6:.1f} / {result.median(name) * 1e6:.1f}" for name in OPERATIONS]
        table.add_row(case.panel, *(f"{size:,}" for size in sizes), *times)
    Console(width=None if sys.stdout.isatty() else bench_run.WIDTH).print(table)
