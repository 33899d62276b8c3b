"""Plots of results, with matplotlib, which is optional."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib(file: Path) -> None:
    """Check before the measurement that matplotlib is installed and can write this file format."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'diptych[plots]'") from None
    from matplotlib.backend_bases import FigureCanvasBase

    endings = [f".{name}" for name in FigureCanvasBase.get_supported_filetypes()]
    if file.suffix.lower() not in endings:
        raise ValueError(f"--plot draws {', '.join(endings)}, and {file.name} has none of these endings")


def plot_speeds(
    file: Path, title: str, speeds: Mapping[str, Sequence[float]], marks: Mapping[str, float]
) -> None:
    """A bar for each case (median), a dot for each repeat, a line for each mark: the limit, other engines."""
    figure, axes = new_figure(title)
    for i, runs in enumerate(speeds.values()):
        axes.bar(i, statistics.median(runs), width=0.6, color="tab:blue", alpha=0.6)
        axes.plot([i] * len(runs), runs, "o", color="tab:blue", markersize=4)
    for (label, value), color in zip(marks.items(), ("black", "tab:orange", "tab:green", "tab:red")):
        axes.axhline(value, color=color, linestyle="--", linewidth=1, label=label)
    axes.set_xticks(range(len(speeds)), list(speeds))
    axes.set_xlim(-0.8, len(speeds) - 0.2)
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    if marks:
        axes.legend()
    figure.savefig(file)


def plot_scaling(file: Path, title: str, speeds: Mapping[str, Mapping[int, float]]) -> None:
    """Draw a line for each case over the number of ranks, and a dashed one for the ideal: the speed with the
    fewest ranks, in proportion."""
    figure, axes = new_figure(title)
    colors = cycle(("tab:blue", "tab:orange", "tab:green", "tab:red"))
    for (label, by_size), color in zip(speeds.items(), colors):
        sizes = sorted(by_size)
        ideal = [by_size[sizes[0]] * size / sizes[0] for size in sizes]
        axes.plot(sizes, [by_size[size] for size in sizes], "o-", color=color, label=label)
        axes.plot(sizes, ideal, "--", color=color, linewidth=1, label=f"{label}, ideal")
    axes.set_xticks(sorted({size for by_size in speeds.values() for size in by_size}))
    axes.set_xlabel("ranks")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")
    figure.savefig(file)


def plot_phases(file: Path, title: str, seconds: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each case, in pieces: the seconds of its phases, one after the other."""
    figure, axes = new_figure(title)
    phases = list(dict.fromkeys(phase for each in seconds.values() for phase in each))
    lefts = [0.0] * len(seconds)
    for phase in phases:
        widths = [each.get(phase, 0.0) for each in seconds.values()]
        axes.barh(range(len(seconds)), widths, left=lefts, label=phase)
        lefts = [left + width for left, width in zip(lefts, widths)]
    axes.set_yticks(range(len(seconds)), list(seconds))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(fontsize="x-small")
    figure.savefig(file)


def plot_itl(file: Path, title: str, itl: Mapping[str, Sequence[float]]) -> None:
    """Cumulative distribution of inter-token latency, one line for each name."""
    figure, axes = new_figure(title)
    for label, seconds in itl.items():
        ordered = sorted(seconds)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axes.step([1000 * each for each in ordered], shares, where="post", label=label)
    axes.set_xscale("log")
    axes.set_xlabel("inter-token latency, ms")
    axes.set_ylabel("share of tokens")
    axes.legend()
    figure.savefig(file)


def plot_growth(
    file: Path, title: str, points: Iterable[tuple[str, float, float]], what: str, cost: str
) -> None:
    """A line for each name of the points (name, x, y), both axes logarithmic: equal slopes are equal powers.
    If x includes 0, the x axis is linear near 0."""
    figure, axes = new_figure(title)
    lines: dict[str, list[tuple[float, float]]] = {}
    for label, *point in points:
        lines.setdefault(label, []).append(point)  # type: ignore[arg-type]
    for label, line in lines.items():
        axes.plot(*zip(*line), "o--" if "reference" in label else "o-", label=label, markersize=3)
    has_zero = any(x == 0 for line in lines.values() for x, _ in line)
    axes.set_xscale("symlog" if has_zero else "log")
    axes.set_yscale("log")
    axes.set_xlabel(what)
    axes.set_ylabel(cost)
    axes.legend(fontsize="x-small")
    figure.savefig(file)


def plot_losses(file: Path, title: str, losses: Mapping[str, Mapping[str, float | None]]) -> None:
    """A row of bars for each kind of loss that was measured, one bar for each name."""
    from matplotlib.figure import Figure

    measured = {kind: values for kind, values in losses.items() if None not in values.values()}
    figure = Figure(figsize=(7, 2.2 * len(measured)), layout="constrained")
    figure.suptitle(title)
    for i, (kind, values) in enumerate(measured.items()):
        axes = figure.add_subplot(len(measured), 1, i + 1)
        axes.bar(range(len(values)), [value or 0.0 for value in values.values()], width=0.6)
        axes.set_xticks(range(len(values)), list(values))
        axes.axhline(0, color="black", linewidth=1)
        axes.set_ylabel(kind, fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(file)


def new_figure(title: str) -> tuple[Any, Axes]:
    # Not pyplot, which opens windows and changes global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes
