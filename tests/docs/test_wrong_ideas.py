"""What learners believe, planted in the solution of each exercise: `diptych check --stage` finds it in the
group that it belongs to, and the hint names it."""

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from diptych.shared import registry
from diptych.shared.tools.commands.check_stage import Grade
from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage, stage_of
from tests.docs.solutions import solution
from tests.docs.wrong_ideas import WrongIdea, stage_15, stages_01_to_07, stages_08_to_14

TABLES: tuple[ModuleType, ...] = (stages_01_to_07, stages_08_to_14, stage_15)
IDEAS = [idea for table in TABLES for idea in table.IDEAS]
MIN_IDEAS = 6  # of a stage
MAX_CASES_BEFORE = 3

_FIRST = {idea.stage: idea for idea in reversed(IDEAS)}


def cases() -> list[object]:
    """The first of each stage is in the fast cut, so its table begins with a quick one."""
    return [
        pytest.param(
            idea,
            id=f"{idea.stage}-{idea.group}-{number}",
            marks=() if idea is _FIRST[idea.stage] else (pytest.mark.full,),
        )
        for number, idea in enumerate(IDEAS)
    ]


def grade_of(stage: Stage, idea: WrongIdea, folder: Path) -> Grade:
    """The first failure up to the group of the idea. Groups before it are checked with a few cases of each
    clause."""
    source, class_name = solution(stage)
    for before, after in idea.changes:
        assert source.count(before) == 1, f"{before!r} is in the solution {source.count(before)} times"
        source = source.replace(before, after)
    file = folder / stage.skeleton
    file.write_text(source, "utf-8")
    target = f"{file}:{class_name}" if class_name else str(file)
    pair = registry.load(stage.component, target), registry.load(stage.component, "reference")
    known = {clause.name: clause for clause in suite.clauses_of(stage.component)}
    names = [group.name for group in stage.groups]
    for group in stage.groups[: names.index(idea.group) + 1]:
        for clause in map(known.__getitem__, group.clauses):
            few = clause if group.name == idea.group else clause.with_cases(clause.cases[:MAX_CASES_BEFORE])
            for verdict in suite.check_implementation([few], *pair, shrink_failures=False, time_limit=None):
                if not verdict.holds:
                    return Grade([], group, verdict)
    return Grade(list(stage.groups))


@pytest.mark.parametrize("idea", cases())
def test_a_wrong_idea_is_caught_in_its_group(idea: WrongIdea, tmp_path: Path) -> None:
    found = grade_of(stage_of(idea.stage), idea, tmp_path)
    assert found.failed is not None, idea.what
    assert found.failure is not None
    assert (found.failed.name, found.failure.clause.name) == (idea.group, idea.clause), found.failure.failure
    assert idea.says in found.hint


def test_every_stage_has_wrong_ideas() -> None:
    counts = Counter(idea.stage for idea in IDEAS)
    staged = {stage.number: {group.name for group in stage.groups} for stage in STAGES}
    assert all(idea.group in staged[idea.stage] for idea in IDEAS)
    assert {number: num for number, num in counts.items() if num < MIN_IDEAS} == {}
