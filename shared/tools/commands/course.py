"""`diptych course`: the way through the course, from the skeletons to an own engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diptych.shared.tools.commands.course_engine import engine, leaderboard
from diptych.shared.tools.commands.course_lab import lab
from diptych.shared.tools.commands.course_options import FOLDER

if TYPE_CHECKING:
    from diptych.shared.tools.course.folder import CourseFolder

app = typer.Typer(
    help="The course: where you are, grades of the exercises.",
    invoke_without_command=True,
)
app.command("lab")(lab)
app.command("engine")(engine)
app.command("leaderboard")(leaderboard)


@app.callback()
def course(
    context: typer.Context,
    folder: Annotated[Path, FOLDER] = Path(),
) -> None:
    """Show the stages, your tasks that are green, and what is next. `diptych course start FOLDER` begins."""
    if context.invoked_subcommand is None:
        from diptych.shared.tools.course.screen import console, show_way

        show_way(console(), open_folder(folder))


def open_folder(path: Path) -> CourseFolder:
    from diptych.shared.tools.course.folder import CourseFolder

    return CourseFolder.at(path)


@app.command()
def start(
    folder: Annotated[Path, typer.Argument(help="A new folder, or one that lacks some files.")],
) -> None:
    """Copy the skeletons of all exercises to FOLDER. Files that are there stay as they are."""
    from diptych.shared.tools.course.folder import CourseFolder
    from diptych.shared.tools.course.screen import console

    _, copied = CourseFolder.start(folder)
    out = console()
    out.print(f"{folder}: {len(copied)} exercises copied" if copied else f"{folder}: nothing was missing")
    out.print(f"go on: cd {folder} && diptych course")


@app.command()
def show(
    stage: Annotated[str, typer.Argument(help="Number of a stage.", metavar="STAGE")],
    folder: Annotated[Path, FOLDER] = Path(),
) -> None:
    """Show one stage: what to read, its tasks, and the functions that are left to write."""
    from diptych.shared.tools.conformance.clauses.stages import stage_of
    from diptych.shared.tools.course.screen import console, show_stage

    show_stage(console(), open_folder(folder), stage_of(stage))


@app.command()
def grade(
    stage: Annotated[
        str | None,
        typer.Argument(help="Number of a stage. Default: the first that is not green.", metavar="[STAGE]"),
    ] = None,
    folder: Annotated[Path, FOLDER] = Path(),
    group: Annotated[str, typer.Option(metavar="NAME", help="Grade this task alone.")] = "",
    again: Annotated[bool, typer.Option("--again", help="Grade green tasks too.")] = False,
    shrink: Annotated[bool, typer.Option(help="Look for the smallest input that fails.")] = True,
    time_limit: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a case may take before it counts as failed.")
    ] = 30.0,
) -> None:
    """Grade a stage, task by task, up to the first that fails, with a hint.

    Green tasks are not run again until the code of the file changes; comments and docstrings do not count.
    After a change the open tasks come first, and slow ones that held before it come last.

    Exit status 0: every task that was run holds; 1: one fails; 2: nothing could be graded.
    """
    from diptych.shared.tools.conformance.clauses.stages import stage_of
    from diptych.shared.tools.course import screen
    from diptych.shared.tools.course.grading import grade_stage, groups_to_grade

    learner = open_folder(folder)
    chosen = stage_of(stage) if stage is not None else learner.next_stage()
    out = screen.console()
    if chosen is None:
        out.print("All stages are green: `diptych course engine` puts your parts together.")
        return
    groups = groups_to_grade(learner, chosen, group, again)
    out.print(f"stage {chosen.number}, {chosen.title}: {learner.file_of(chosen)}")
    if not groups:
        out.print("every task is green, and the file has not changed (--again grades anew)")
    lines = screen.GradeLines(out, chosen)
    try:
        failed = grade_stage(
            learner, chosen, groups, lines.starts, lines.ends,
            shrink=shrink, time_limit=time_limit, on_case=lines.update,
        )  # fmt: skip
    finally:
        lines.stop()
    if failed is not None:
        screen.show_failure(out, learner, chosen, failed)
        raise typer.Exit(1)
    if learner.is_green(chosen):
        screen.show_success(out, learner, chosen)
    else:
        screen.show_left(out, learner, chosen)
