"""Plots the results of a server under several loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from diptych.shared.tools.bench.plots import new_figure
from diptych.shared.tools.bench.serve_load import LoadResult


def plot_loads(file: Path, title: str, results: Sequence[LoadResult]) -> None:
    """Plot complete requests per second and goodput over the load, and ITL and TTFT. An infinite rate is
    drawn at the right end. Lines without a prefix cache are lighter."""
    figure, axes = new_figure(title)
    latencies = axes.twinx()
    is_open = results[0].arrivals.rate is not None
    loads = [result.arrivals.rate or result.arrivals.concurrency or 0 for result in results]
    largest = max((load for load in loads if math.isfinite(load)), default=1)
    x = [load if math.isfinite(load) else 1.5 * largest for load in loads]
    for has_cache, alpha, end in ((True, 1.0, ""), (False, 0.4, ", cache off")):
        chosen = [(load, r) for load, r in zip(x, results) if r.has_cache is has_cache]
        for name, metric, color, line in (
            ("complete", "request_rate", "C0", "o-"),
            ("goodput", "goodput", "C1", "o--"),
        ):
            points = [(load, getattr(r, metric)) for load, r in chosen]
            if points:
                axes.plot(*zip(*points), line, color=color, alpha=alpha, label=name + end)
        for metric, color in (("ttft", "C2"), ("itl", "C3")):
            points = [(load, found["p99"]) for load, r in chosen if (found := r.summary(metric))]
            if points:
                label = f"{metric.upper()} p99{end}"
                latencies.plot(*zip(*points), "s:", color=color, alpha=alpha, markersize=4, label=label)
    axes.set_xlabel("arrivals per second" if is_open else "concurrency")
    axes.set_ylabel("requests/s")
    axes.set_ylim(bottom=0)
    latencies.set_ylabel("ms")
    latencies.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *latencies.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize="small")
    figure.savefig(file)


def plot_turns(file: Path, title: str, results: Sequence[LoadResult]) -> None:
    """Plot the median TTFT of each turn of a conversation, a line for each load, dashed without a prefix
    cache; dotted, that of a later turn's new tokens alone."""
    figure, axes = new_figure(title)
    for number, result in enumerate(results):
        values = result.ttft_by_turn()
        line = "o-" if result.has_cache else "o--"
        axes.plot(
            range(1, len(values) + 1), values, line, color=f"C{number}", markersize=4, label=result.name
        )
        alone = result.summary("alone_ttft")
        if alone is not None:
            axes.axhline(alone["p50"], color=f"C{number}", linestyle=":", linewidth=1)
    axes.set_xlabel("turn")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("TTFT p50, ms")
    axes.set_yscale("log")
    axes.legend(fontsize="small", title="dotted: new tokens alone")
    figure.savefig(file)
