"""`diptych check --stage`: grade an exercise of the course, group by group, up to the first that fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.clauses.clause import Clause
    from diptych.shared.tools.conformance.clauses.stages import Group, Stage
    from diptych.shared.tools.conformance.clauses.suite import Verdict


@dataclass
class Grade:
    """The grade of a file: groups that hold, and the first failure."""

    passed: list[Group]
    failed: Group | None = None  # None: every group holds, or the interface is not implemented
    failure: Verdict | None = None  # the first failing case

    @property
    def hint(self) -> str:
        return "" if self.failed is None or self.failure is None else hint_for(self.failed, self.failure)


def grade(stage: Stage, file: str, *, shrink: bool = True, time_limit: float = 30.0) -> Grade:
    """Run the groups in order, up to the first failing clause. A file without the class of the stage raises
    `ValueError`."""
    from diptych.shared.tools.conformance.clauses import suite

    known = {clause.name: clause for clause in suite.clauses_of(stage.component)}
    group_of = {name: group for group in stage.groups for name in group.clauses}
    clauses = [known[name] for name in group_of]
    verdicts = suite.check_component(
        stage.component, stage.target(file), clauses=clauses, shrink_failures=shrink, time_limit=time_limit
    )
    grade = Grade([])
    for clause, failure in _by_clause(verdicts):
        group = group_of.get(clause.name)  # None: the clause of the interface
        if failure is not None:
            grade.failed, grade.failure = group, failure
            return grade
        if group is not None and clause.name == group.clauses[-1]:
            grade.passed.append(group)
    return grade


def hint_for(group: Group, verdict: Verdict) -> str:
    """The hint of the failing clause or of its group; for a function that is not written, of the group."""
    assert verdict.failure is not None
    is_open = str(verdict.failure.actual).startswith("NotImplementedError")
    return group.hint if is_open else group.hint_of(verdict.clause.name)


def _by_clause(verdicts: Iterator[Verdict]) -> Iterator[tuple[Clause, Verdict | None]]:
    """Yields each clause after it has ended or failed, with its first failing case."""
    current: Clause | None = None
    for verdict in verdicts:
        if current is not None and verdict.clause is not current:
            yield current, None
        current = verdict.clause
        if not verdict.holds:
            yield current, verdict
            return
    if current is not None:
        yield current, None


def print_grade(stage: Stage, file: str, grade: Grade) -> None:
    """Print the progress line, and the first failing group with its hint and one failing case."""
    from rich.console import Console
    from rich.text import Text

    from diptych.shared.tools.commands.check_results import Result, print_failure

    console = Console()
    line = Text(f"stage {stage.number}, {stage.title}: ")
    for i, group in enumerate(stage.groups):
        mark, style = ("✓", "green") if group in grade.passed else ("·", "dim")
        if group is grade.failed:
            mark, style = "✗", "bold red"
        line.append("  " if i else "")
        line.append(f"{mark}\u00a0{group.name}".replace(" ", "\u00a0"), style)  # no line break inside
    console.print(line)
    console.print(f"{len(grade.passed)} of {len(stage.groups)} groups hold")
    if grade.failure is None:
        name = stage.target(file)
        console.print(f"complete. Use it: diptych generate --use {stage.component}={name}", style="green")
        return
    console.print()
    if grade.failed is not None:
        console.print(Text(f"{grade.failed.name}: {grade.hint}", "yellow"))
    alone = grade.failure.clause.with_cases([grade.failure.case])
    print_failure(console, Result(alone, [grade.failure]))


def print_instructions(stage: Stage) -> None:
    """Print the instructions of a stage: copy, complete, check."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Text(f"stage {stage.number}, {stage.title}: docs/course/{stage.page}"))
    console.print(f"1. cp {stage.skeleton_path} {stage.skeleton}")
    console.print(f"2. complete {stage.class_name or 'the classes'} in {stage.skeleton}, group by group:")
    for group in stage.groups:
        console.print(Text(f"   {group.name}: {len(group.clauses)} clauses"))
    console.print(f"3. diptych check --stage {stage.number} {stage.skeleton}")
