"""What `diptych check kernel` prints: a short table, and the verdict below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.kernels.kernel_report import Report, Verdict

MOST_ROWS = 11
"""With title, heading, lines and the row of the others the table has at most 15 lines."""


def print_list(only: str | None) -> None:
    """A line for each operation; with `only`, the signatures and shapes of its conventions."""
    from rich.console import Console
    from rich.text import Text

    from diptych.shared.tools.conformance.kernels.conventions import CONVENTIONS, LIKES, operation_of

    console = Console()
    if only is None:
        width = max(map(len, LIKES))
        for name in LIKES:
            console.print(Text(f"{name:{width}}  {', '.join(each.library for each in CONVENTIONS[name])}"))
        console.print(Text("--list --like OPERATION prints signatures and shapes.", "dim"))
        return
    name = operation_of(only)
    console.print(Text(f"{name}: {LIKES[name].what}", "bold"))
    for each in CONVENTIONS[name]:
        console.print(Text(f"  --convention {each.library}: {each.signature}"))
        console.print(Text(f"    {each.shapes}", "dim"))


def print_report(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    from diptych.shared.tools.conformance.kernels.kernel_report_html import observed

    console = Console()
    _print_cases(report, console)
    for line in observed(report):
        console.print(Text(line))
    if report.operators:
        console.print(Text(f"operators in one call: {', '.join(report.operators)}"))
    print_timings(report)
    for note in report.notes:
        console.print(Text(note, "yellow"))
    if report.speed:
        console.print(Text(report.speed))
    if report.failing:
        first = report.failing[0]
        console.print(Text(f"{first.case}: {first.failure}"))
    for name in report.names:
        console.print(Text(f"what it does: {name}", "red"))
    console.print(Text(report.summary, "bold red" if report.status else "bold green"))


def _print_cases(report: Report, console: object) -> None:
    """Failing cases first, then refused ones, then those with the largest errors."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)

    def order(verdict: Verdict) -> tuple[int, float]:
        kind = 0 if verdict.failure is not None else 1 if verdict.refusal is not None else 2
        return kind, -verdict.error / verdict.allowed if kind == 2 and verdict.allowed else 0.0

    title = f"{report.like.name}, convention {report.convention.library}: {report.target}"
    table = Table("case", title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("error", "allowed"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    shown = sorted(report.verdicts, key=order)
    shown, hidden = shown[:MOST_ROWS], shown[MOST_ROWS:]
    before = ""
    room = max(console.width - max((len(each.case) for each in shown), default=0) - 28, 24)
    for verdict in shown:
        words, style = verdict.words, "green"
        if verdict.failure is not None:
            style = "red"
        elif verdict.refusal is not None or verdict.refused_forms:
            style = "yellow"
        if words != "holds":
            words, before = "as above" if words == before else words, words
        words = words if len(words) <= room else words[: room - 1] + "…"
        errors = f"{verdict.error:.1e}", f"{verdict.allowed:.1e}"
        table.add_row(Text(verdict.case), *errors, Text(words, style))
    if hidden:
        failing = sum(each.failure is not None for each in hidden)
        table.add_row(
            Text("1 more case" if len(hidden) == 1 else f"{len(hidden)} more cases", "dim"),
            "",
            "",
            f"{failing} fail" if failing else "hold",
        )
    console.print(table)


def print_timings(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not report.timings:
        return
    table = Table(
        "size", title=f"µs of one call, on {report.device}", box=box.SIMPLE_HEAD, title_justify="left"
    )
    has_bound = any(timing.bound is not None for timing in report.timings)
    has_ours = any(timing.ours is not None for timing in report.timings)
    beside = [report.like.beside] if has_ours else []
    for heading in ("this function", *beside, *(("bound", "of the bound") if has_bound else ())):
        table.add_column(heading, justify="right")
    for timing in report.timings:
        cells = [_us(timing.seconds), *([_us(timing.ours)] if has_ours else [])]
        if timing.bound is not None:
            cells += [_us(timing.bound), f"{100 * timing.bound / timing.seconds:.0f} %"]
        table.add_row(Text(timing.case), *cells)
    console = Console()
    console.print(table)
    for note in report.timing_notes:
        console.print(Text(note, "yellow"))


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.1f}"
