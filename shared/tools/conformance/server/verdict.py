"""Prints the results of a run on a terminal and as JSON: one verdict, a table by group, failures with
evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diptych.shared.tools.conformance.ci_reports import Checked, CiReport
from diptych.shared.tools.conformance.server.capabilities import Offers
from diptych.shared.tools.conformance.server.checks import GROUPS, Finding, Result

STYLES = {"holds": "green", "fails": "bold red", "near tie": "yellow", "not offered": "dim"}
HIDDEN = ("by position", "histogram")  # for plots
FIGURES = ("smallest fault found", "F1", "schema accuracy")
CURVE = "_.:-=+*#%@"


@dataclass(frozen=True)
class Report:
    """The results of a run. `facts`: what was checked, and how. `num_chosen`: the selected checks; fewer ran
    if the server stopped, or with `is_over` because the time was over. `notes`: on the run."""

    facts: dict[str, str]
    offers: Offers
    results: Sequence[Result]
    num_chosen: int
    is_over: bool = False
    notes: Sequence[str] = ()

    @property
    def failing(self) -> list[Result]:
        return [result for result in self.results if result.status == "fails"]

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the format that gave the limits."""
        ran = [result for result in self.results if result.status != "not offered"]
        missing = self.num_chosen - len(self.results)
        end = f"; {missing} checks did not run: {self._why_missing}" if missing else ""
        if self.failing:
            names = ", ".join(result.check.name for result in self.failing)
            return f"{len(self.failing)} of {len(ran)} checks fail: {names}{end}{self._limits}"
        if not ran:
            return f"nothing could be checked{end}"
        num_cases = sum(result.num_cases for result in ran)
        holds = f"{len(ran)} checks hold, in {num_cases:,} cases"
        if not self.offers.scoring:
            what = "single tokens alone were" if self._has_tokens else "nothing was"
            return f"{holds}; {what} compared with the reference: no log-probabilities{end}"
        return f"the server agrees with the reference: {holds}{end}{self._limits}"

    @property
    def _has_tokens(self) -> bool:
        """Whether single tokens were compared with those of the reference."""
        ran = (result for result in self.results if result.status != "not offered")
        return any(result.check.group == "seeded" for result in ran)

    @property
    def _why_missing(self) -> str:
        return "the time is over" if self.is_over else "the server is gone"

    @property
    def _limits(self) -> str:
        dtype = self.facts.get("dtype")
        return f" (limits of {dtype})" if dtype else ""

    @property
    def exit_status(self) -> int:
        """0: every check holds; 1: one fails, or the server stopped; 2: nothing could be checked, or nothing
        could be compared with the reference, or the time was over."""
        if self.failing:
            return 1
        if self.num_chosen > len(self.results):
            return 2 if self.is_over else 1
        is_checked = any(result.status != "not offered" for result in self.results)
        return 0 if is_checked and (self.offers.scoring or self._has_tokens) else 2

    def for_ci(self) -> CiReport:
        """Not offered: skipped. A near tie holds. Code scanners show a file named server."""
        checks = [
            Checked(
                result.check.name,
                result.check.sentence,
                [
                    "\n".join([finding.what, *(f"{label}: {value}" for label, value in rows)])
                    for finding in result.findings
                    if finding.status == "fails"
                    for _, *rows in [failure_rows(finding)]
                ],
                "server",
                result.check.group,
                result.findings[0].what if result.status == "not offered" else "",
            )
            for result in self.results
        ]
        if missing := self.num_chosen - len(self.results):
            gone = f"{self._why_missing}; {missing} checks did not run"
            checks.append(Checked("api.alive", "The server answers.", [], "server", "api", not_run=gone))
        return CiReport(f"diptych check server {self.facts.get('server', '')}", self.facts, checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.sentence,
            "exit_status": self.exit_status,
            "facts": self.facts,
            "offers": asdict(self.offers),
            "checks": [
                {
                    "name": result.check.name,
                    "sentence": result.check.sentence,
                    "status": result.status,
                    "num_cases": result.num_cases,
                    "findings": [asdict(finding) for finding in result.findings],
                }
                for result in self.results
            ],
        }


def print_report(report: Report) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(report.sentence, "bold red" if report.exit_status else "green"))
    console.print(Text(", ".join(f"{name} {value}" for name, value in report.facts.items()), "dim"))
    table = Table()
    for name in ("group", "holds", "near tie", "not offered", "fails"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for group in GROUPS:
        found = [result.status for result in report.results if result.check.group == group]
        if found:
            counts = [found.count(status) for status in ("holds", "near tie", "not offered", "fails")]
            table.add_row(group, *(str(count) if count else "" for count in counts))
    console.print(table)
    for line in (*report.notes, *error_lines(report.results), *figure_lines(report.results)):
        console.print(Text(line))
    for result in report.results:
        if result.status == "not offered":
            reason = result.findings[0].what
            console.print(Text(f"not offered  {result.check.name}: {reason}", "dim"))
    for result in report.results:
        if result.status == "near tie":
            ties = [finding for finding in result.findings if finding.status == "near tie"]
            console.print(Text(f"near tie     {result.check.name}: {len(ties)}, {ties[0].what}", "yellow"))
    for result in report.failing:
        console.print()
        console.print(Text(result.check.name, "bold red"))
        console.print(Padding(Text(result.check.sentence), (0, 2)))
        failures = [finding for finding in result.findings if finding.status == "fails"]
        for label, value in failure_rows(failures[0]):
            console.print(Padding(Text.assemble((f"{label}  ", "dim"), value), (0, 2)))
        if len(failures) > 1:
            console.print(Padding(Text(f"and {len(failures) - 1} more findings"), (0, 2)))
        if result.check.why:
            console.print(Padding(Text(result.check.why, "dim"), (0, 2)))


def failure_rows(finding: Finding) -> list[tuple[str, str]]:
    """(label, text) for the evidence of a failing finding."""
    rows = [("what", finding.what)]
    if finding.expected is not None or finding.actual is not None:
        rows += [("expected", short(finding.expected)), ("got", short(finding.actual))]
    rows += [
        (name, value if name == "last request" else short(value))
        for name, value in finding.evidence.items()
        if name not in HIDDEN
    ]
    return rows


def short(value: Any, length: int = 240) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= length else text[: length - 1] + "…"


def error_lines(results: Sequence[Result]) -> list[str]:
    """Write, for each check that scored tokens, its errors, and the largest by position as a row of
    characters."""
    lines = []
    for result in results:
        for finding in result.findings:
            curve = finding.evidence.get("by position")
            if curve:
                mean, largest = finding.evidence["mean error"], finding.evidence["largest error"]
                lines.append(
                    f"{result.check.name:<20} mean error {mean:.1e}, largest {largest:.1e} "
                    f"[{_characters(curve)}]"
                )
    return lines


def figure_lines(results: Sequence[Result]) -> list[str]:
    """The figures that say what a check would have found, or how close its sides are."""
    return [
        f"{result.check.name:<20} {finding.what}; {name} {short(finding.evidence[name])}"
        for result in results
        for finding in result.findings
        for name in FIGURES
        if finding.evidence.get(name) is not None
    ]


def _characters(curve: Sequence[Sequence[float]], width: int = 24) -> str:
    """The largest error of each of `width` ranges of positions: _ is below 1e-6, @ about 1 or more."""
    first, last = curve[0][0], curve[-1][0]
    largest: dict[int, float] = {}
    for position, _, error in curve:
        column = int((position - first) * (width - 1) / max(last - first, 1))
        largest[column] = max(largest.get(column, 0.0), error)
    levels = len(CURVE) - 1
    characters: list[str] = []
    for column in range(width):
        if column in largest:
            level = round((math.log10(max(largest[column], 1e-12)) + 6) * levels / 6)
            characters.append(CURVE[min(max(level, 0), levels)])
        else:
            characters.append(characters[-1])  # no position is in this range
    return "".join(characters)
