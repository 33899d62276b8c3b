"""`diptych check`: checks an implementation against every clause of its component's contract."""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from shared.commands import bench_run
from shared.commands.check_kernel import check_kernel
from shared.commands.check_server import check_server

if TYPE_CHECKING:
    from shared.conformance.clause import Clause
    from shared.conformance.suite import Verdict


class WhatIsChecked(TyperGroup):
    """Dispatches `diptych check server URL` and the like. An argument that is not a subcommand is a component
    or a stage."""

    def with_subcommand(self, args: list[str]) -> list[str]:
        is_named = bool(args) and args[0] in {*self.commands, "--help", "-h"}
        return args if is_named else ["component", *args]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.with_subcommand(args))


app = typer.Typer(cls=WhatIsChecked, help="Hold an implementation to the reference.")
app.command("kernel")(check_kernel)
app.command("server")(check_server)


@app.command("component")
def check(
    component: Annotated[
        str | None,
        typer.Argument(
            help="What it implements: radix_cache, scheduler ... With --stage: the file to grade.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Argument(
            help="A panel, a backend, package.module:Class or file.py:Class. Components that are modules "
            "of classes: package.module or file.py.",
            show_default=False,
        ),
    ] = None,
    clause: Annotated[
        list[str] | None,
        typer.Option("--clause", metavar="NAME", help="Only this clause. May be repeated."),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="NN",
            help="Grade an exercise of the course: clauses in teaching order, with hints. Without a file: "
            "what to do.",
        ),
    ] = None,
    list_clauses: Annotated[
        bool, typer.Option("--list", help="List the clauses with their sentences, and run nothing.")
    ] = False,
    shrink: Annotated[bool, typer.Option(help="Look for the smallest input that fails.")] = True,
    time_limit: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a case may take before it counts as failed.")
    ] = 30.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything to this file as well.")
    ] = None,
    contract: Annotated[
        str,
        typer.Option(
            metavar="VERSION",
            help="Version of the contract that TARGET was written for, as 1.0: says what has changed since.",
        ),
    ] = "",
) -> None:
    """Run the contract of COMPONENT against TARGET, or grade an exercise: check --stage 05 my_cache.py.
    The word "component" may be left out: check radix_cache reference.

    Exit status 0: every clause holds; 1: something fails; 2: nothing could be checked.
    """
    from shared.conformance import suite
    from shared.conformance.contract_versions import older_than_current, versions_of

    if stage is not None:
        if target or clause or list_clauses or json_file or contract:
            raise ValueError("--stage takes one file, and of the options only --no-shrink and --time-limit")
        _check_stage(stage, component, shrink, time_limit)
        return
    if component is None:
        raise ValueError(f"name a component ({', '.join(suite.CONTRACTS)}) or a --stage of the course")
    clauses = chosen_clauses(suite.clauses_of(component), clause or [])
    if list_clauses:
        print_clauses(clauses)
        return
    if target is None:
        raise ValueError(f"name an implementation of {component} to check, or use --list")
    bench_run.check_files(None, json_file)
    if note := older_than_current(component, contract):
        print(note, file=sys.stderr)
    verdicts = suite.check_component(
        component, target, clauses=clauses, shrink_failures=shrink, time_limit=time_limit
    )
    num_cases = 1 + sum(len(each.cases) for each in clauses)
    results = gather(refusals_beside(_with_progress(verdicts, num_cases)))
    print_results(results, f"{component}: {target}")
    if json_file is not None:
        version = versions_of(component)[-1]
        report = {"component": component, "target": target, "contract": version, **as_json(results)}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not all(result.holds for result in results):
        raise typer.Exit(1)


def _check_stage(number: str, file: str | None, shrink: bool, time_limit: float) -> None:
    from shared.commands.check_stage import grade, print_grade, print_instructions
    from shared.conformance.stages import stage_of

    stage = stage_of(number)
    if file is None:
        print_instructions(stage)
        return
    result = grade(stage, file, shrink=shrink, time_limit=time_limit)
    print_grade(stage, file, result)
    if result.failure is not None:
        raise typer.Exit(1)


@dataclass
class Result:
    """The verdicts on one clause."""

    clause: Clause
    verdicts: list[Verdict] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # of cases that hold: refused features, and why

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.holds]

    @property
    def num_held(self) -> int:
        return len(self.verdicts) - len(self.failures)

    @property
    def holds(self) -> bool:
        return not self.failures


def refusals_beside(verdicts: Iterator[Verdict]) -> Iterator[tuple[Verdict, list[str]]]:
    """Yields each verdict with the refusals that were warned about; other warnings are emitted again."""
    from shared.conformance.attention_batches import RefusalWarning

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
    for verdict, refusals in verdicts:
        if not results or results[-1].clause is not verdict.clause:
            results.append(Result(verdict.clause))
        results[-1].verdicts.append(verdict)
        if verdict.holds:  # shrinking runs a failing case many times
            results[-1].refusals += refusals
    return results


def as_json(results: list[Result]) -> dict[str, Any]:
    return {
        "holds": all(result.holds for result in results),
        "clauses": [
            {
                "name": result.clause.name,
                "kind": result.clause.kind,
                "statement": result.clause.statement,
                "num_cases": len(result.clause.cases),
                "num_held": result.num_held,
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


def case_fields(case: Any) -> list[tuple[str, str]]:
    """(field, value) of a case, as text."""
    from shared.conformance.case import fields_of

    return [(name, repr(value)) for name, value in (fields_of(case) or {}).items()]


def chosen_clauses(clauses: list[Clause], names: list[str]) -> list[Clause]:
    """Those of the given names, or all; an unknown name raises `ValueError`."""
    known = [clause.name for clause in clauses]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no clause {', '.join(unknown)}; the clauses are {', '.join(known)}")
    return [clause for clause in clauses if not names or clause.name in names]


def _with_progress(verdicts: Iterator[Verdict], total: int) -> Iterator[Verdict]:
    """Shows a progress bar on a terminal's stderr, which disappears before the results are printed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for verdict in verdicts:
            progress.update(task, advance=1, description=verdict.clause.name)
            yield verdict


def print_clauses(clauses: list[Clause]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("clause", "kind", "cases")
    table.add_column("what must hold", overflow="fold")
    for clause in clauses:
        cells = (clause.name, clause.kind, str(len(clause.cases)), clause.statement)
        table.add_row(*map(Text, cells))
    Console().print(table)


def print_results(results: list[Result], title: str) -> None:
    """Print the summary, a table of all clauses, and the failures."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    failing = [result for result in results if not result.holds]
    if failing:
        console.print(f"{len(failing)} of {len(results)} clauses fail", style="bold red")
    else:
        num_cases = sum(len(result.verdicts) for result in results)
        console.print(f"all {len(results)} clauses hold, in {num_cases} cases", style="green")
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
            Text("holds", "green") if result.holds else Text("fails", "bold red"),
        )
    console.print(table)
    _print_refusals(console, results)
    for result in failing:
        console.print()
        print_failure(console, result)


def _print_refusals(console: Any, results: list[Result]) -> None:
    """Print the refused cases, which count as holding but did not run."""
    from rich.text import Text

    refusals = [refusal for result in results for refusal in result.refusals]
    if not refusals:
        return
    reasons = Counter(refusal.removeprefix("refused: ").partition(": ")[2] or refusal for refusal in refusals)
    console.print(f"{len(refusals)} cases are refused, which the contract allows:", style="yellow")
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
        row("not run", f"{not_run} more cases: each could take as long")
    console.print(Padding(grid, (0, 2)))


def _input_lines(case: Any) -> list[str]:
    """The lines of a case: its fields except the name; sequences have one element per line."""
    from shared.conformance.case import fields_of

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
