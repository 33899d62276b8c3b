"""The results of `diptych check`: verdicts gathered by clause, printed and as JSON."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diptych.shared.tools.conformance.ci_reports import Checked, CiReport

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.clauses.clause import Clause
    from diptych.shared.tools.conformance.clauses.suite import Verdict


@dataclass
class Result:
    """The verdicts on one clause. `num_refused`: the cases of which a part is refused, and which do not fail.
    `refusals`: their reasons, each once a case."""

    clause: Clause
    verdicts: list[Verdict] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    num_refused: int = 0

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.holds]

    @property
    def num_held(self) -> int:
        return len(self.verdicts) - len(self.failures) - self.num_refused

    @property
    def holds(self) -> bool:
        return not self.failures

    @property
    def words(self) -> str:
        if not self.num_refused:
            return "holds" if self.holds else "fails"
        if self.num_refused == len(self.verdicts):
            return "refused"
        return f"{'holds' if self.holds else 'fails'}, {self.num_refused} refused"


def refusals_beside(verdicts: Iterator[Verdict]) -> Iterator[tuple[Verdict, list[str]]]:
    """Yields each verdict with the refusals that were warned about; other warnings are emitted again."""
    from diptych.shared.tools.conformance.oracles.attention_batches import RefusalWarning

    others: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RefusalWarning)
        for verdict in verdicts:
            yield verdict, [str(each.message) for each in caught if each.category is RefusalWarning]
            others += [each for each in caught if each.category is not RefusalWarning]
            caught.clear()
    for each in others:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def gather(verdicts: Iterable[tuple[Verdict, list[str]]]) -> list[Result]:
    results: list[Result] = []
    gather_into(results, verdicts)
    return results


def gather_until_interrupt(verdicts: Iterable[tuple[Verdict, list[str]]]) -> tuple[list[Result], bool]:
    """The results, and whether Ctrl-C ended them: then of the clauses that are decided. A clause of which
    some cases have held is not."""
    results: list[Result] = []
    try:
        gather_into(results, verdicts)
    except KeyboardInterrupt:
        last = results[-1] if results else None
        if last is not None and last.holds and len(last.verdicts) < len(last.clause.cases):
            results.pop()
        return results, True
    return results, False


def gather_into(results: list[Result], verdicts: Iterable[tuple[Verdict, list[str]]]) -> None:
    for verdict, refusals in verdicts:
        if not results or results[-1].clause is not verdict.clause:
            results.append(Result(verdict.clause))
        results[-1].verdicts.append(verdict)
        if verdict.holds:  # shrinking runs a failing case many times
            results[-1].refusals += {reason_of(refusal): refusal for refusal in refusals}.values()
            results[-1].num_refused += bool(refusals)


def as_json(results: list[Result], is_interrupted: bool) -> dict[str, Any]:
    """An interrupted check does not show that the contract holds."""
    return {
        "holds": not is_interrupted and all(result.holds for result in results),
        "is_interrupted": is_interrupted,
        "clauses": [
            {
                "name": result.clause.name,
                "kind": result.clause.kind,
                "statement": result.clause.statement,
                "num_cases": len(result.clause.cases),
                "num_held": result.num_held,
                "num_refused": result.num_refused,
                "refusals": result.refusals,
                "failures": [_failure_as_json(verdict) for verdict in result.failures],
            }
            for result in results
        ],
    }


def _failure_as_json(verdict: Verdict) -> dict[str, Any]:
    assert verdict.failure is not None
    return {
        "case": dict(case_fields(verdict.case)),
        "smallest_case": dict(case_fields(verdict.failure.smallest_case)),
        "what": verdict.failure.what,
        "expected": repr(verdict.failure.expected),
        "actual": repr(verdict.failure.actual),
    }


def for_ci(results: list[Result], component: str, target: str, num_clauses: int) -> CiReport:
    """One check for each clause; a clause whose every case is refused is skipped."""
    path = target.partition(":")[0]
    checks = [
        Checked(
            result.clause.name,
            result.clause.statement,
            ["\n".join(f"{name}: {text}" for name, text in _failure_rows(each)) for each in result.failures],
            path,
            component,
            skipped="; ".join(result.refusals) if result.words == "refused" else "",
        )
        for result in results
    ]
    if missing := num_clauses - len(results):
        text = f"{missing} of {num_clauses} clauses are not run"
        checks.append(Checked("all clauses", "All clauses are run.", [], path, component, not_run=text))
    return CiReport(f"diptych check {component} {target}", {}, checks)


def _failure_rows(verdict: Verdict) -> list[tuple[str, str]]:
    assert verdict.failure is not None
    failure = verdict.failure
    case = str(getattr(verdict.case, "name", verdict.case))
    values = ("expected", failure.expected), ("got", failure.actual)
    return [("what", f"{failure.what}, in {case}"), *((name, _readable(value)) for name, value in values)]


def case_fields(case: Any) -> list[tuple[str, str]]:
    """(field, value) of a case, as text."""
    from diptych.shared.tools.conformance.clauses.case import fields_of

    return [(name, repr(value)) for name, value in (fields_of(case) or {}).items()]


def print_results(results: list[Result], title: str, is_interrupted: bool) -> None:
    """Print the summary, a table of all clauses, and the failures."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    failing = [result for result in results if not result.holds]
    num_refused = sum(result.num_refused for result in results)
    refused = f"; {num_refused} are refused" if num_refused else ""
    if failing:
        console.print(f"{len(failing)} of {len(results)} clauses fail", style="bold red")
    else:
        num_held = sum(result.num_held for result in results)
        which = "the first" if is_interrupted else "all"
        console.print(f"{which} {len(results)} clauses hold, in {num_held} cases{refused}", style="green")
    table = Table(title=title)
    table.add_column("clause", overflow="fold")
    table.add_column("kind")
    table.add_column("cases", justify="right")
    table.add_column("verdict")
    for result in results:
        table.add_row(
            Text(result.clause.name),
            result.clause.kind,
            f"{result.num_held}/{len(result.clause.cases)}",
            Text(
                result.words, "bold red" if not result.holds else "yellow" if result.num_refused else "green"
            ),
        )
    console.print(table)
    _print_refusals(console, results)
    for result in failing:
        console.print()
        print_failure(console, result)


def reason_of(refusal: str) -> str:
    """The refusal without the name of its case."""
    return refusal.removeprefix("refused: ").partition(": ")[2] or refusal


def _print_refusals(console: Any, results: list[Result]) -> None:
    """Print the refusals: a refused case is no failure, and was not checked."""
    from rich.text import Text

    refusals = [refusal for result in results for refusal in result.refusals]
    if not refusals:
        return
    reasons = Counter(map(reason_of, refusals))
    num_cases = sum(result.num_refused for result in results)
    console.print(f"{num_cases} cases are refused, which the contract allows:", style="yellow")
    for reason, count in reasons.most_common():
        console.print(Text(f"  {count} x {reason}"))


def print_failure(console: Any, result: Result) -> None:
    """Print a failing clause: its sentence, and the first failing case."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    first = result.failures[0]
    failure = first.failure
    assert failure is not None
    console.print(Text(result.clause.name, "bold red"))
    console.print(Padding(Text(result.clause.statement), (0, 2)))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")

    def row(label: str, value: str) -> None:
        grid.add_row(label, Text(value))

    case = failure.smallest_case
    is_smaller = case != first.case
    label = getattr(first.case, "name", None)
    row("case", str(label) if label is not None else repr(first.case))
    heading = "smallest input" if is_smaller else "input"
    for line in _input_lines(case):
        row(heading, line)
        heading = ""
    row("what", failure.what)
    row("expected", _readable(failure.expected))
    row("got", _readable(failure.actual))
    if len(result.failures) > 1:
        others = [str(getattr(each.case, "name", each.case)) for each in result.failures[1:]]
        row("also in", "; ".join(others))
    not_run = len(result.clause.cases) - len(result.verdicts)
    if not_run:
        last = result.failures[-1].failure
        is_late = last is not None and last.what == "time limit"
        row("not run", f"{not_run} more cases" + (": each could take as long" if is_late else ""))
    console.print(Padding(grid, (0, 2)))


def _input_lines(case: Any) -> list[str]:
    """The lines of a case: its fields except the name; sequences have one element per line."""
    from diptych.shared.tools.conformance.clauses.case import fields_of

    lines: list[str] = []
    for name, value in (fields_of(case) or {}).items():
        if isinstance(value, tuple) and len(value) > 1 and all(map(fields_of, value)):
            lines += [f"{name}[{i}] = {element!r}" for i, element in enumerate(value)]
        elif name != "name":
            lines.append(f"{name} = {value!r}")
    return lines


def _readable(value: object) -> str:
    """Strings unchanged; any other value as its repr."""
    return value if isinstance(value, str) else repr(value)
