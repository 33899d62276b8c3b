"""`diptych check`: checks an implementation against every clause of its component's contract."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.check_engine import check_engine
from diptych.shared.tools.commands.check_kernel import check_kernel
from diptych.shared.tools.commands.check_results import (
    as_json,
    for_ci,
    gather_until_interrupt,
    print_results,
    refusals_beside,
)
from diptych.shared.tools.commands.check_server import check_server
from diptych.shared.tools.commands.report_options import BadgeFile, JsonFile, JunitFile, SarifFile

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.clauses.clause import Clause
    from diptych.shared.tools.conformance.clauses.suite import Verdict


class WhatIsChecked(TyperGroup):
    """Dispatches `diptych check server URL` and the like. An argument that is not a subcommand is a component
    or a stage."""

    def with_subcommand(self, args: list[str]) -> list[str]:
        is_named = bool(args) and args[0] in {*self.commands, "--help", "-h"}
        return args if is_named else ["component", *args]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.with_subcommand(args))


KERNEL_HINT = "a bare function is checked by `diptych check kernel FILE.py:NAME --like OPERATION`"

app = typer.Typer(cls=WhatIsChecked, help="Hold an implementation to the reference.")
app.command("kernel")(check_kernel)
app.command("server")(check_server)
app.command("engine")(check_engine)


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
    json_file: JsonFile = None,
    junit: JunitFile = None,
    sarif: SarifFile = None,
    badge: BadgeFile = None,
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

    Exit status 0: every clause holds; 1: something fails; 2: nothing could be checked; 130: interrupted.
    """
    from diptych.shared import registry
    from diptych.shared.tools.conformance.clauses import suite
    from diptych.shared.tools.conformance.clauses.contract_versions import older_than_current, versions_of

    if stage is not None:
        if any((target, clause, list_clauses, json_file, junit, sarif, badge, contract)):
            raise ValueError("--stage takes one file, and of the options only --no-shrink and --time-limit")
        _check_stage(stage, component, shrink, time_limit)
        return
    if component is None and list_clauses:
        print_components()
        return
    if component is None:
        raise ValueError(f"name a component ({', '.join(suite.CONTRACTS)}) or a --stage of the course")
    clauses = chosen_clauses(contract_of(component), clause or [])
    if list_clauses:
        print_clauses(clauses)
        return
    if target is None:
        raise ValueError(f"name an implementation of {component} to check, or use --list")
    bench_run.check_files(None, json_file, junit, sarif, badge)
    if note := older_than_current(component, contract):
        print(note, file=sys.stderr)
    verdicts = suite.check_component(
        component, target, clauses=clauses, shrink_failures=shrink, time_limit=time_limit
    )
    num_cases = 1 + sum(len(each.cases) for each in clauses)
    results, is_interrupted = gather_until_interrupt(refusals_beside(_with_progress(verdicts, num_cases)))
    if results:
        print_results(results, f"{component}: {target}", is_interrupted)
    if is_interrupted:
        print(f"interrupted after {len(results)} of {1 + len(clauses)} clauses")
    elif hint := function_hint(registry.load(component, target)):
        print(hint)
    for_ci(results, component, target, 1 + len(clauses)).write(junit, sarif, badge)
    if json_file is not None and results:
        version = versions_of(component)[-1]
        report = {"component": component, "target": target, "contract": version}
        report |= as_json(results, is_interrupted)
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if is_interrupted:
        raise typer.Exit(130)  # as a shell reports an interrupted program
    if not all(result.holds for result in results):
        raise typer.Exit(1)


def _check_stage(number: str, file: str | None, shrink: bool, time_limit: float) -> None:
    from diptych.shared.tools.commands.check_stage import grade, print_grade, print_instructions
    from diptych.shared.tools.conformance.clauses.stages import stage_of

    stage = stage_of(number)
    if file is None:
        print_instructions(stage)
        return
    result = grade(stage, file, shrink=shrink, time_limit=time_limit)
    print_grade(stage, file, result)
    if result.failure is not None:
        raise typer.Exit(1)


def contract_of(component: str) -> list[Clause]:
    """The clauses of a component; an unknown name raises `ValueError`, with a hint if it is an operation of
    bare functions."""
    from diptych.shared.tools.conformance.clauses import suite

    try:
        return suite.clauses_of(component)
    except ValueError as error:
        raise ValueError(with_kernel_hint(str(error), component)) from None


def with_kernel_hint(message: str, component: str) -> str:
    """The message about an unknown component, with a hint if it is an operation of bare functions."""
    from diptych.shared.tools.conformance.kernels.conventions import operations_named

    if not operations_named(component):
        return message
    like = " or ".join(operations_named(component))
    return f"{component} is an operation, not a component: {KERNEL_HINT.replace('OPERATION', like)}"


def function_hint(implementation: Any) -> str:
    """How to check a bare function; empty for a class or a module."""
    return KERNEL_HINT if callable(implementation) and not isinstance(implementation, type) else ""


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


def print_components() -> None:
    """What can be checked, on one screen."""
    from diptych.shared.tools.conformance.clauses import suite
    from diptych.shared.tools.conformance.clauses.contract_versions import versions_of

    names = list(suite.CONTRACTS)
    print("diptych check COMPONENT TARGET: components with the versions of their contracts")
    width = max(map(len, names)) + 8
    cells = [f"{name} {versions_of(name)[-1]}".ljust(width) for name in sorted(names)]
    for start in range(0, len(cells), 3):
        print(("  " + "".join(cells[start : start + 3])).rstrip())
    for line in (
        "diptych check COMPONENT --list: its clauses",
        "diptych check kernel FILE.py:NAME --like OPERATION: a bare function; kernel --list names operations",
        "diptych check server URL --model MODEL: a server with OpenAI's API",
        "diptych check engine A --against B: kernels and number formats of a whole engine",
        "diptych check --stage NN FILE.py: an exercise of the course",
    ):
        print(line)


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
