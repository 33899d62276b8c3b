"""What learners believe, planted in the solution of each exercise: `diptych check --stage` finds it in the
group that it belongs to, and the hint names it."""

from collections import Counter
from pathlib import Path

from diptych.shared import registry
from diptych.shared.tools.commands.check_stage import Grade
from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage, stage_of
from tests.docs.solutions import solution
from tests.docs.wrong_ideas import IDEAS, stage_15, stages_01_to_07, stages_08_to_14
from tests.planted import Bug

TABLES = (stages_01_to_07, stages_08_to_14, stage_15)  # they register IDEAS
MIN_IDEAS = 6  # of a stage
MAX_CASES_BEFORE = 3

_FIRST = {idea.where: idea for idea in reversed(IDEAS.values())}
"""The first of each stage is in the fast cut, so its table begins with a quick one."""


def grade_of(stage: Stage, last: str, idea: Bug, folder: Path) -> Grade:
    """The first failure up to the group `last`. Groups before it are checked with a few cases of each
    clause."""
    source, class_name = solution(stage)
    for before, after in idea.plant:
        assert source.count(before) == 1, f"{before!r} is in the solution {source.count(before)} times"
        source = source.replace(before, after)
    file = folder / stage.skeleton
    file.write_text(source, "utf-8")
    target = f"{file}:{class_name}" if class_name else str(file)
    pair = registry.load(stage.component, target), registry.load(stage.component, "reference")
    known = {clause.name: clause for clause in suite.clauses_of(stage.component)}
    names = [group.name for group in stage.groups]
    for group in stage.groups[: names.index(last) + 1]:
        for clause in map(known.__getitem__, group.clauses):
            few = clause if group.name == last else clause.with_cases(clause.cases[:MAX_CASES_BEFORE])
            for verdict in suite.check_implementation([few], *pair, shrink_failures=False, time_limit=None):
                if not verdict.holds:
                    return Grade([], group, verdict)
    return Grade(list(stage.groups))


@IDEAS.found_by(is_fast=lambda _, idea: idea is _FIRST[idea.where])
def test_a_wrong_idea_is_caught_in_its_group(bug: Bug, tmp_path: Path) -> dict[str, str]:
    found = grade_of(stage_of(bug.where), bug.finder.partition(": ")[0], bug, tmp_path)
    if found.failed is None or found.failure is None:
        return {}
    return {f"{found.failed.name}: {found.failure.clause.name}": found.hint}


def test_every_stage_has_wrong_ideas() -> None:
    counts = Counter(idea.where for idea in IDEAS.values())
    assert {stage.number for stage in STAGES if counts[stage.number] < MIN_IDEAS} == set()
