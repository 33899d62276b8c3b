"""`diptych bench prefix-cache`: time of a match, an insert and an eviction, by content of the tree."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, Plot, run
from diptych.shared.tools.commands.option_values import integers, names_among

if TYPE_CHECKING:
    from diptych.shared.tools.bench.prefix_cache import CacheResult


def prefix_cache(
    tokens: Annotated[
        str, typer.Option(help="Cached tokens, up to whole sequences; several separated by commas.")
    ] = "10000,100000,1000000,10000000",
    sequence_len: Annotated[str, typer.Option(help="Tokens of a sequence; several by commas.")] = "1024",
    depth: Annotated[str, typer.Option(help="Nodes of a sequence; several by commas.")] = "1",
    page_size: Annotated[str, typer.Option(help="Tokens of a page; several by commas.")] = "1,16",
    panel: Annotated[str, typer.Option(help="Panels separated by commas.")] = "reference,optimized",
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each kind.")] = 300,
    plot: Plot = None,
    output: Output = None,
) -> None:
    """CPU time of calls of the prefix cache, in trees of all combinations of the given sizes."""
    from diptych.shared import registry
    from diptych.shared.tools.bench.prefix_cache import CacheCase, measure

    panels = names_among("--panel", panel, registry.PANELS)
    sizes = product(
        integers("--page-size", page_size),
        integers("--depth", depth),
        integers("--sequence-len", sequence_len),
        integers("--tokens", tokens),
        panels,
    )
    cases = [  # make all cases before measuring, because making a case checks it
        CacheCase(side, number, length, num_nodes, page) for page, num_nodes, length, number, side in sizes
    ]
    run(PrefixCacheBenchmark(cases, lambda case: measure(case, repeats)), output=output, plot=plot)


def cell_of(operation: str) -> Column:
    return Column(operation, lambda r: f"{r.least(operation) * 1e6:.1f} / {r.median(operation) * 1e6:.1f}")


class PrefixCacheBenchmark(Benchmark):
    name = "prefix-cache"
    title = "processor time of a call, us: least / median"
    columns = (
        Column("panel", lambda result: result.case.panel, is_text=True),
        Column("page", lambda result: f"{result.case.page_size:,}"),
        Column("depth", lambda result: f"{result.case.depth:,}"),
        Column("sequence", lambda result: f"{result.case.sequence_len:,}"),
        Column("cached tokens", lambda result: f"{result.case.num_cached_tokens:,}"),
        *(cell_of(operation) for operation in ("match", "insert", "evict")),
    )

    def as_json(self, result: CacheResult) -> dict[str, Any]:
        from diptych.shared.tools.bench.result_header import spread

        sizes = {"num_cached_tokens": result.case.num_cached_tokens}
        times = {operation: spread(seconds) for operation, seconds in result.times.items()}
        return asdict(result.case) | sizes | {"times_s": times}

    def draw(self, file: Path, results: list[CacheResult]) -> None:
        from diptych.shared.tools.bench import plots

        points = [
            (
                f"{operation}, page {result.case.page_size}, {result.case.panel}",
                result.case.num_cached_tokens,
                result.median(operation) * 1e6,
            )
            for result in results
            for operation in result.times
        ]
        plots.plot_growth(file, "a call of the prefix cache", points, "cached tokens", "us of processor time")
