"""The output of every `diptych bench` command: a table, a JSON file, a timeline and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from diptych.shared.tools.commands import bench_run

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


PANEL = "Measuring and results"


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=PANEL, **more)


# Options shared by several commands.
Repeats = Annotated[int, _option("Measurements of each case; the table shows medians.", min=1)]
WarmUps = Annotated[int, _option("Runs before, which do not count.", min=0)]
Bound = Annotated[
    bool,
    _option("Measure what the device can do, and compare with its roofline bound.", "--limit/--no-limit"),
]
Trace = Annotated[Path | None, _option("Write the timeline of one more run of the last case to this file.")]
Plot = Annotated[Path | None, _option("Draw the results into this file (.svg, .png).")]
Output = Annotated[Path | None, _option("Write everything to this JSON file.", "--output", "-o")]


class Column(NamedTuple):
    """`text` of a result; None: an empty cell. A column without a cell is left out."""

    heading: str
    text: Callable[[Any], str | None]
    is_text: bool = False  # left-justified


def ms(value: float | None, digits: int = 3) -> str | None:
    return None if value is None else f"{value * 1000:.{digits}f}"


def bound_note(label: str, share: float, bound: str) -> str:
    return f"{label}: {share:.2f} of the roofline bound ({bound}, from what was measured here)"


class Benchmark:
    """Base class of a benchmark: cases, their measurement, and columns of the results. Results grow during
    the measurement, so an interrupt keeps the complete ones."""

    name: str
    columns: Sequence[Column] = ()
    title: str | None = None

    def __init__(self, cases: Sequence[Any] = (), measure_case: Callable[[Any], Any] | None = None) -> None:
        self.cases = cases
        self.measure_case = measure_case
        self.results: list[Any] = []
        self.facts: dict[str, Any] = {}  # in the JSON file, in addition to versions and results

    def measure(self, progress: bench_run.Progress) -> None:
        """Fill in the results."""
        for case in self.cases:
            progress.on_run(str(case))
            assert self.measure_case is not None
            self.results.append(self.measure_case(case))

    def complete(self) -> list[Any]:
        """Results with at least one measurement."""
        return self.results

    def table(self, results: list[Any]) -> RenderableType:
        return make_table(self.columns, results, self.title)

    def notes(self, results: list[Any]) -> Iterable[str]:
        """Lines below the table. They may add facts."""
        return ()

    def as_json(self, result: Any) -> dict[str, Any]:
        found: dict[str, Any] = result.as_json()
        return found

    def draw(self, file: Path, results: list[Any]) -> None:
        """Plot the results."""
        raise NotImplementedError


def run(
    benchmark: Benchmark, *, output: Path | None = None, plot: Path | None = None, trace: Path | None = None
) -> None:
    """Measure, then print, write and plot. After an error or Ctrl-C this reports the complete results, then
    raises that error or `typer.Exit`."""
    bench_run.check_files(plot, trace, output)

    from diptych.shared.tools.bench import result_header

    header, failure = result_header.header(benchmark.name), None
    with bench_run.Progress() as progress:
        try:
            benchmark.measure(progress)
        except Exception as error:
            failure = error
    console, results = bench_run.console(), benchmark.complete()
    if results:
        console.print(benchmark.table(results))
        for line in benchmark.notes(results):
            console.print(line)
    elif progress.is_interrupted:
        console.print("interrupted before the first result; nothing is written")
    is_complete = failure is None and not progress.is_interrupted
    if output is not None and (results or is_complete):
        facts = benchmark.facts | {"is_interrupted": progress.is_interrupted}
        result_header.write_json(output, header | facts | {"results": list(map(benchmark.as_json, results))})
        print(f"written to {output}")
    if results and trace is not None:
        bench_run.save_trace(trace, benchmark.results[-1].recording)
    if results and plot is not None:
        benchmark.draw(plot, results)
    if failure is not None:
        raise failure
    if progress.is_interrupted:
        raise typer.Exit(130)  # as a shell reports an interrupted program


def make_table(columns: Sequence[Column], rows: Sequence[Any], title: str | None = None) -> Table:
    from rich.table import Table

    table = Table(title=title)
    cells = [[column.text(row) for row in rows] for column in columns]
    shown = [
        (column, texts) for column, texts in zip(columns, cells) if any(text is not None for text in texts)
    ]
    for column, _ in shown:
        table.add_column(column.heading, justify="left" if column.is_text else "right", overflow="fold")
    for row in zip(*(texts for _, texts in shown)):
        table.add_row(*(text or "" for text in row))
    return table
