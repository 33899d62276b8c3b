"""What `diptych course` shows on a terminal: the way through the course, a stage, and grades as they come."""

from __future__ import annotations

import shlex
import textwrap
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from diptych.shared.tools.commands.check_results import Result, print_failure
from diptych.shared.tools.commands.check_stage import hint_for
from diptych.shared.tools.conformance.clauses.stages import STAGES, Group, Stage
from diptych.shared.tools.course.exercise import FLAGS, NEEDS, reading_minutes, todos_of
from diptych.shared.tools.course.folder import CourseFolder, State
from diptych.shared.tools.course.grading import GroupGrade

DOTS = {State.GREEN: ("●", "green"), State.HELD: ("◐", "yellow"), State.OPEN: ("○", "dim")}
WIDEST = 100
"""Columns of text, on a wide terminal too."""


def console() -> Console:
    found = Console(highlight=False)
    found.width = min(found.width, WIDEST)
    return found


def show_way(out: Console, folder: CourseFolder) -> None:
    """Print every stage with its tasks, and what is next."""
    counts = [state for stage in STAGES for state in folder.states(stage).values()]
    num_green = sum(state is State.GREEN for state in counts)
    num_stages = sum(folder.is_green(stage) for stage in STAGES)
    out.print()
    out.print(
        Text.assemble(
            (" Your engine", "bold"), f"   {num_stages} of {len(STAGES)} stages, ",
            f"{num_green} of {len(counts)} tasks are green",
        )
    )  # fmt: skip
    out.print(Text(f" {bar(num_green / len(counts), 60)}", "green"))
    out.print()
    following = folder.next_stage()
    table = Table.grid(padding=(0, 2))
    for style in ("bold", "", "", "dim"):
        table.add_column(style=style, no_wrap=True)
    for stage in STAGES:
        states = folder.states(stage)
        marker = "▸" if stage is following else " "
        dots = Text.assemble(*(DOTS[state] for state in states.values()))
        title = Text(stage.title, "bold" if stage is following else "")
        table.add_row(f"{marker}{stage.number}", title, dots, words_of(folder, stage, states))
    out.print(Padding(table, (0, 1)))
    out.print()
    if following is None:
        out.print(Text(" All stages are green. Put the parts together:  diptych course engine", "bold green"))
    else:
        _show_next(out, folder, following)


def bar(share: float, width: int) -> str:
    filled = round(share * width)
    return "━" * filled + "╌" * (width - filled)


def words_of(folder: CourseFolder, stage: Stage, states: dict[str, State]) -> str:
    """The state of a stage in a few words."""
    num_green = sum(state is State.GREEN for state in states.values())
    if num_green == len(states):
        minutes = folder.times(stage).minutes
        return "green" if minutes is None else f"green, {duration(minutes)}"
    if State.HELD in states.values():
        return f"{num_green} of {len(states)}, and some to grade again"
    return f"{num_green} of {len(states)}" if num_green else f"page {reading(stage)}"


def duration(minutes: float) -> str:
    if minutes < 1:
        return "under a minute"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def reading(stage: Stage) -> str:
    minutes = reading_minutes(stage)
    return "" if minutes is None else f"{minutes} min"


def _show_next(out: Console, folder: CourseFolder, stage: Stage) -> None:
    """Print the task that comes next, and its command."""
    states = folder.states(stage)
    task = next(name for name, state in states.items() if state is not State.GREEN)
    place = list(states).index(task) + 1
    out.print(
        Text.assemble(
            " Next: ",
            (task, "bold"),
            f", task {place} of {len(states)} of stage {stage.number}, {stage.title}",
        )
    )
    rows = [("read", f"docs/course/{stage.page}"), ("site", "make serve-docs, in the clone")]
    left = _open_functions(folder, stage, task)
    rows += [("write", f"{stage.skeleton}:{line}  {name}") for name, line in left] or [
        ("file", stage.skeleton)
    ]
    rows += [("grade", "diptych course grade"), ("more", f"diptych course show {stage.number}")]
    out.print(Padding(_grid(rows), (0, 3)))


def _open_functions(folder: CourseFolder, stage: Stage, task: str) -> list[tuple[str, int]]:
    """(function, line) of a task in the learner's file; none in a file that is no Python."""
    try:
        todos = todos_of(folder.source_of(stage))
    except (SyntaxError, ValueError):
        return []
    return [(todo.name, todo.line) for todo in todos if todo.group == task]


def _grid(rows: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


def show_stage(out: Console, folder: CourseFolder, stage: Stage) -> None:
    """Print what a stage needs, its tasks, and what is left to write."""
    out.print()
    out.print(Text(f" Stage {stage.number}: {stage.title}", "bold"))
    titles = {each.number: each.title for each in STAGES}
    needs = [f"{number} {titles[number]}" for number in NEEDS[stage.number]]
    minutes = folder.times(stage).minutes
    rows = [
        ("page", f"docs/course/{stage.page}" + (f", {reading(stage)} to read" if reading(stage) else "")),
        ("read before", ", ".join(needs) or "nothing"),
        ("component", f"{stage.component}: the contract is in docs/components/{stage.component}.md"),
        ("your file", str(folder.file_of(stage))),
        *([("your time", duration(minutes))] if minutes is not None else []),
    ]
    out.print(Padding(_grid(rows), (0, 1)))
    out.print()
    states = folder.states(stage)
    for group in stage.groups:
        dot, style = DOTS[states[group.name]]
        seconds = folder.seconds_of(stage, group)
        took = "" if seconds is None else f", graded in {seconds:.1f} s"
        clauses = f"{len(group.clauses)} clause{'s' * (len(group.clauses) > 1)}{took}"
        out.print(Text.assemble(f" {' '}", (dot, style), " ", (group.name, "bold"), (f"  {clauses}", "dim")))
        for name, line in _open_functions(folder, stage, group.name):
            out.print(Text(f"     write {name}, line {line}", "dim"))
    out.print()
    out.print(Text(f" Grade it: diptych course grade {stage.number}"))


# ---- grades as they come ----


class GradeLines:
    """One line for each group: with a count of its cases while it runs, on a terminal, and then with its
    grade."""

    def __init__(self, out: Console, stage: Stage) -> None:
        self.out = out
        self.width = max(len(group.name) for group in stage.groups)
        self.status = Console(stderr=True).status("") if out.is_terminal else None

    def starts(self, group: Group) -> None:
        self.group = group
        if self.status is not None:
            self.status.update(f"{group.name} ...")
            self.status.start()

    def update(self, clause: str, done: int, total: int) -> None:
        if self.status is not None:
            self.status.update(
                f"{self.group.name:{self.width}}  {bar(done / total, 20)}  {done}/{total}  {clause}"
            )

    def ends(self, grade: GroupGrade) -> None:
        if self.status is not None:
            self.status.stop()
        mark, style = ("✓", "green") if grade.failure is None else ("✗", "bold red")
        name = f"{grade.group.name:{self.width}}"
        rest = f"  {grade.num_cases} cases, {grade.seconds:.1f} s"
        self.out.print(Text.assemble("  ", (f"{mark} {name}", style), (rest, "dim")))

    def stop(self) -> None:
        """Also after an exception: a status line is not left on the terminal."""
        if self.status is not None:
            self.status.stop()


def show_failure(out: Console, folder: CourseFolder, stage: Stage, grade: GroupGrade) -> None:
    """Print the failing case, and the hint last, above the prompt of the shell."""
    failure = grade.failure
    assert failure is not None
    out.print()
    if (todo := todo_of(grade)) is not None:
        out.print(Text(f"not written: {todo}", "bold"))
    else:
        alone: Any = failure.clause.with_cases([failure.case])
        print_failure(out, Result(alone, [failure]))
    out.print()
    held = [name for name, state in folder.states(stage).items() if state is State.HELD]
    if held:
        out.print(Text(f"Not graded again: {', '.join(held)} held before this change (--again).", "dim"))
        out.print()
    hint = textwrap.fill(f"{grade.group.name}: {hint_of(grade)}", out.width - 2)
    out.print(Text(textwrap.indent(hint, "▎ "), "yellow"))


def todo_of(grade: GroupGrade) -> str | None:
    """What the function says that is not written; None: the failure is another one."""
    found = None if grade.failure is None else grade.failure.failure
    text = str(found.actual) if found is not None else ""
    head, todo, what = text.partition("NotImplementedError: TODO ")
    return None if head or not todo else what


def hint_of(grade: GroupGrade) -> str:
    """The hint of the clause or group, or how to get to the interface."""
    assert grade.failure is not None
    if grade.failure.clause.name not in grade.group.clauses:
        return "the class must be there, and must have every method of its interface."
    return hint_for(grade.group, grade.failure)


def show_left(out: Console, folder: CourseFolder, stage: Stage) -> None:
    """Print the tasks that are not written, and those that held before the last change of the file."""
    states = folder.states(stage)
    for state, what in ((State.OPEN, "still open"), (State.HELD, "to grade again, as the file has changed")):
        if names := [name for name, each in states.items() if each is state]:
            out.print(f"{what}: {', '.join(names)}")


def show_success(out: Console, folder: CourseFolder, stage: Stage) -> None:
    """Print what to do with a green stage, and where to go on."""
    minutes = folder.times(stage).minutes
    took = "" if minutes is None else f", {duration(minutes)} after its first grade"
    out.print()
    out.print(Text(f"Stage {stage.number}, {stage.title}, is green{took}.", "bold green"))
    out.print("Run the engine with it:")
    out.print(Text(f"  {command_with(folder, stage)}", "cyan"), soft_wrap=True)
    if "dummy" in FLAGS.get(stage.number, ""):
        out.print(f"Random weights: no text to read, but that of --use {stage.component}=reference.")
    following = folder.next_stage()
    if following is not None:
        out.print(f"Next is stage {following.number}, {following.title}: docs/course/{following.page}")
    else:
        out.print("All stages are green. Put the parts together: diptych course engine")


def command_with(folder: CourseFolder, stage: Stage) -> str:
    """The command that runs an engine with the learner's part of a stage."""
    use = f"{stage.component}={stage.target(str(folder.file_of(stage)))}"
    words = ("diptych generate", FLAGS.get(stage.number), "--use", shlex.quote(use), '"What is 12 + 30?"')
    return " ".join(filter(None, words))
