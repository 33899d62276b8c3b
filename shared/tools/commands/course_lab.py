"""`diptych course lab`: engines with a planted bug, of which only the symptom is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diptych.shared.tools.commands.course_options import FOLDER

if TYPE_CHECKING:
    from diptych.shared.tools.course.labs import Lab


def lab(
    number: Annotated[
        int | None, typer.Argument(help="Number of a lab. Without one: the list.", show_default=False)
    ] = None,
    answer: Annotated[
        str,
        typer.Option(metavar="COMPONENT:CLAUSE", help="Where the bug is, and a clause that fails."),
    ] = "",
    reveal: Annotated[bool, typer.Option("--reveal", help="Show the answer.")] = False,
    folder: Annotated[Path, FOLDER] = Path(),
) -> None:
    """Run an engine with a planted bug and show the symptom. Find the component, and a clause that catches
    the bug, with `diff`, `check` and `--check-invariants`.

    Exit status 0: the symptom is shown, or the answer is right; 1: the answer is wrong.
    """
    from diptych.shared.tools.course import lab_screen
    from diptych.shared.tools.course.labs import judge, lab_of

    if number is None:
        lab_screen.show_list(solved_in(folder))
        return
    chosen = lab_of(number)
    if reveal:
        lab_screen.show_explanation(chosen)
    elif not answer:
        lab_screen.show_symptom(chosen)
    else:
        verdict = judge(chosen, answer.strip())
        lab_screen.show_verdict(chosen, answer.strip(), verdict)
        if verdict != "right":
            raise typer.Exit(1)
        keep(folder, chosen)


def solved_in(folder: Path) -> set[int]:
    """Labs that were solved, as `course.json` of the folder says; none without it."""
    from diptych.shared.tools.course.folder import FILE, CourseFolder

    return set(CourseFolder.at(folder).labs) if (folder / FILE).is_file() else set()


def keep(folder: Path, solved: Lab) -> None:
    """Note a solved lab in `course.json`, if the folder has one."""
    from diptych.shared.tools.course.folder import FILE, CourseFolder

    if (folder / FILE).is_file():
        learner = CourseFolder.at(folder)
        learner.labs = sorted({*learner.labs, solved.number})
        learner.save()
