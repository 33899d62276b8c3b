"""What `diptych course engine` and `leaderboard` show on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diptych.shared.tools.course.engine_page import NAMES
from diptych.shared.tools.course.own_engine import Part, Report, SoakResult
from diptych.shared.tools.course.screen import bar, console


class Lines:
    """A line for each part when it is graded, and a status line meanwhile on a terminal."""

    def __init__(self) -> None:
        self.out = console()
        self._status = Console(stderr=True).status("") if self.out.is_terminal else None

    def __enter__(self) -> Lines:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._status is not None:
            self._status.stop()

    def status(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)

    def case(self, what: str, done: int, total: int) -> None:
        self.status(f"{what:24} {bar(done / total, 20)} {done}/{total}")

    def part(self, part: Part) -> None:
        if part.state == "open":
            mark, style, words = "·", "dim", "not written: the reference's is used"
        elif part.failing:
            mark, style, words = "✗", "bold red", f"fails: {', '.join(part.failing)}"
        else:
            mark, style, words = "✓", "green", ""
        if part.state == "replaced":
            words = "; ".join(filter(None, [words, "replaced by a later stage"]))
        count = f"{part.num_held:3} of {part.num_clauses:2}"
        head = f"  {mark} {part.stage} {part.title:21}{count}  "
        first, *more = textwrap.wrap(words, self.out.width - len(head), break_on_hyphens=False) or [""]
        self.out.print(Text.assemble((head, style), first), soft_wrap=True)
        for line in more:
            self.out.print(Text(" " * len(head) + line), soft_wrap=True)

    def soak(self, soak: SoakResult) -> None:
        self.out.print()
        if not soak.failure:
            self.out.print(
                Text(f"soak   {soak.num_answers} answers, {soak.num_steps} steps, no failure", "green")
            )
            return
        self.out.print(Text(f"soak   failed after {soak.num_answers} answers", "bold red"))
        self.out.print(Text(textwrap.indent(textwrap.fill(soak.failure, self.out.width - 7), " " * 7)))

    def speed(self, tokens_per_s: dict[str, float]) -> None:
        fastest = max(tokens_per_s.values())
        for number, (name, speed) in enumerate(tokens_per_s.items()):
            head = "speed" if number == 0 else ""
            words = f"{speed:7.0f} tokens/s" if speed else "   failed"
            line = f"{head:7}{NAMES[name]:17}{bar(speed / fastest, 36)} {words}"
            self.out.print(Text(line, "bold" if name == "yours" else ""))


def show_end(report: Report, folder: Path) -> None:
    """Print the sum, and what to do with the engine."""
    out = console()
    out.print()
    style = "bold green" if report.share == 1 and not report.soak.failure else "bold"
    speed = f"{report.speed:.2f} times the reference's speed"
    out.print(Text(f"{report.name}: {report.share:.1%} of all clauses, {speed}", style))
    out.print(Text(f"written: {folder / 'engine.html'}, badge.svg, engine.json, engine.use"))
    out.print(Text(f"talk to it:  diptych chat --use @{folder / 'engine.use'}", "cyan"))
    out.print(Text(f"serve it:    diptych serve --use @{folder / 'engine.use'}", "cyan"))


def show_leaderboard(reports: Sequence[Report]) -> None:
    out = console()
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("engine", overflow="fold")
    table.add_column("by", overflow="fold")
    for name in ("parts", "clauses", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("soak", no_wrap=True)
    for place, report in enumerate(reports, start=1):
        soak = report.soak
        table.add_row(
            str(place), Text(report.name, "bold"), report.author, f"{report.num_used}/{len(report.parts)}",
            f"{report.share:.1%}", f"{report.speed:.2f}x",
            Text("failed", "bold red") if soak.failure else Text(f"{soak.num_answers} answers", "green"),
        )  # fmt: skip
    out.print(table)
