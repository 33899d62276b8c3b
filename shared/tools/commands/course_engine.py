"""`diptych course engine` grades a learner's parts as one engine; `course leaderboard` ranks several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands.course_options import FOLDER

if TYPE_CHECKING:
    from diptych.shared.tools.course.own_engine import Report


def engine(
    folder: Annotated[Path, FOLDER] = Path(),
    name: Annotated[str, typer.Option(help="Name of your engine. Default: that of the folder.")] = "",
    seconds: Annotated[float, typer.Option(min=0, help="Time of the soak.")] = 30.0,
) -> None:
    """Put all written parts into one engine and grade it: every clause of every stage, a soak with all
    invariants, and tokens per second beside both panels. Green tasks are not run again.

    Writes to the folder: engine.use (for --use @engine.use), engine.json, engine.html and badge.svg.

    Exit status 0: every clause of the written parts holds, and the soak has no failure; 1: otherwise.
    """
    from diptych.shared.tools.course import engine_screen
    from diptych.shared.tools.course.engine_page import badge, engine_page
    from diptych.shared.tools.course.engine_speed import tokens_per_s
    from diptych.shared.tools.course.folder import CourseFolder
    from diptych.shared.tools.course.own_engine import FILE, Report, graded_parts, soaked, use_of, write_use

    learner = CourseFolder.at(folder)
    use = use_of(learner)
    if not use:
        raise ValueError("no part is written: `diptych course` says where to begin")
    with engine_screen.Lines() as lines:
        parts = graded_parts(learner, lines.part, lines.case)
        soak = soaked(use, seconds, lambda what: lines.status(f"soak: {what}"))
        lines.soak(soak)
        speeds = tokens_per_s(use, lambda what: lines.status(f"speed: {what}"))
        lines.speed(speeds)
    report = Report(name or folder.resolve().name, parts, soak, speeds, device_name())
    write_use(learner)
    (folder / FILE).write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    (folder / "engine.html").write_text(engine_page(report), encoding="utf-8")
    (folder / "badge.svg").write_text(badge(report), encoding="utf-8")
    engine_screen.show_end(report, folder)
    if soak.failure or any(part.failing for part in parts):
        raise typer.Exit(1)


def device_name() -> str:
    """The GPU's name, or the number of cores."""
    import os

    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{os.cpu_count()} CPU cores"


def leaderboard(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders with an engine.json.", metavar="FOLDER...")
    ] = None,
    output: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")] = None,
    ours: Annotated[bool, typer.Option(help="Rank three engines of the project too.")] = True,
) -> None:
    """Rank engines: without a failure in the soak first, then by clauses that hold, then by speed relative to
    the reference panel."""
    from diptych.shared.tools.course import engine_screen
    from diptych.shared.tools.course.engine_page import leaderboard_page, ranked

    reports = [read_report(folder) for folder in folders or []]
    reports += own_reports() if ours else []
    if not reports:
        raise ValueError("name a folder in which `diptych course engine` was run")
    reports = ranked(reports)
    engine_screen.show_leaderboard(reports)
    if output is not None:
        output.write_text(leaderboard_page(reports), encoding="utf-8")
        print(f"written: {output}")


def read_report(folder: Path) -> Report:
    """The report of a folder. A missing or damaged one raises `ValueError`."""
    from diptych.shared.tools.course.own_engine import FILE, Report

    file = folder / FILE
    if not file.is_file():
        raise ValueError(f"{folder} has no {FILE}: run `diptych course engine --folder {folder}` first")
    try:
        return Report.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None


def own_reports() -> list[Report]:
    """The recorded reports of three engines of the project: `python -m tests.labs.record_engines`."""
    from diptych.shared.tools.course import own_engine

    file = Path(own_engine.__file__).with_name("engines.json")
    entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return [own_engine.Report.from_json(entry) for entry in entries]
