"""Grading a stage in the order that answers soonest: the open tasks, and before them quick ones again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.stages import Group, Stage
from diptych.shared.tools.conformance.clauses.suite import Verdict
from diptych.shared.tools.course.folder import CourseFolder, State

QUICK = 2.0
"""Seconds of a group that is graded again before later ones as soon as the file has changed."""


@dataclass(frozen=True)
class GroupGrade:
    """The grade of one group. `failure`: its first failing case; None: the group holds."""

    group: Group
    seconds: float
    num_cases: int
    failure: Verdict | None = None


def groups_to_grade(folder: CourseFolder, stage: Stage, only: str = "", again: bool = False) -> list[Group]:
    """The groups in the order of grading. Green groups are left out, except with `again`. Groups that held
    with another version of the file come last, because a change seldom breaks them; quick ones keep their
    place. `only`: this group alone; an unknown one raises `ValueError`."""
    if only:
        chosen = [group for group in stage.groups if group.name == only]
        if not chosen:
            known = ", ".join(group.name for group in stage.groups)
            raise ValueError(f"stage {stage.number} has no task {only!r}; its tasks are {known}")
        return chosen
    if again:
        return list(stage.groups)
    states = folder.states(stage)
    now, afterwards = [], []
    for group in stage.groups:
        state = states[group.name]
        if state is State.OPEN or (state is State.HELD and (folder.seconds_of(stage, group) or 0.0) <= QUICK):
            now.append(group)
        elif state is State.HELD:
            afterwards.append(group)
    return now + afterwards


def grade_group(
    stage: Stage,
    group: Group,
    file: str,
    *,
    shrink: bool = True,
    time_limit: float = 30.0,
    on_case: Callable[[str, int, int], None] = lambda clause, done, total: None,
) -> GroupGrade:
    """Run a group up to its first failing case. `on_case` gets the clause, the cases that are done and their
    number. A file without the class of the stage raises `ValueError`."""
    known = {clause.name: clause for clause in suite.clauses_of(stage.component)}
    clauses = [known[name] for name in group.clauses]
    total = sum(len(clause.cases) for clause in clauses)
    start, done = time.monotonic(), 0
    for verdict in suite.check_component(
        stage.component, stage.target(file), clauses=clauses, shrink_failures=shrink, time_limit=time_limit
    ):
        if not verdict.holds:
            return GroupGrade(group, time.monotonic() - start, done, verdict)
        is_case = verdict.clause in clauses  # not the clause of the interface
        done += is_case
        on_case(verdict.clause.name, done, total)
    return GroupGrade(group, time.monotonic() - start, done)


def grade_stage(
    folder: CourseFolder,
    stage: Stage,
    groups: Sequence[Group],
    on_start: Callable[[Group], Any],
    on_end: Callable[[GroupGrade], Any],
    **options: Any,
) -> GroupGrade | None:
    """Grade groups until one fails, which is returned, and keep the grades. `options`: of `grade_group`."""
    source = folder.source_of(stage)
    folder.begin(stage)
    for group in groups:
        on_start(group)
        grade = grade_group(stage, group, str(folder.file_of(stage)), **options)
        if grade.failure is None:
            folder.holds(stage, group, source, grade.seconds, grade.num_cases)
        else:
            folder.fails(stage, group)
        on_end(grade)
        if grade.failure is not None:
            return grade
    return None
