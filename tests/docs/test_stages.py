"""Exercises: groups cover the contract, skeletons fail where they begin, and completing the functions of a
group makes it hold."""

from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.shared import registry
from diptych.shared.tools.cli import app
from diptych.shared.tools.commands.check_stage import grade
from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage
from tests.docs.solutions import completed, open_functions, solution

ROOT = Path(__file__).parents[2]

each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.number)


@each_stage
def test_every_clause_is_in_one_group(stage: Stage) -> None:
    grouped = Counter(name for group in stage.groups for name in group.clauses)
    assert grouped == Counter(clause.name for clause in suite.clauses_of(stage.component))
    assert all(group.clauses and group.hint for group in stage.groups)
    assert all(group.hints.keys() <= set(group.clauses) for group in stage.groups)


@each_stage
def test_skeleton_fails_at_its_first_group_with_the_hint(stage: Stage) -> None:
    result = CliRunner().invoke(app, ["check", "--stage", stage.number, str(ROOT / stage.skeleton_path)])
    assert result.exit_code == 1
    assert f"0 of {len(stage.groups)} groups hold" in result.output
    hint = " ".join(result.output.split())
    assert f"{stage.groups[0].name}: {stage.groups[0].hint}" in hint
    assert f"TODO {stage.groups[0].name}:" in hint


@each_stage
@pytest.mark.full
def test_solution_passes_every_group(stage: Stage, tmp_path: Path) -> None:
    source, class_name = solution(stage)
    file = tmp_path / stage.skeleton
    file.write_text(source, "utf-8")
    result = grade(Stage(**{**vars(stage), "class_name": class_name}), str(file))
    assert result.failure is None
    assert result.passed == list(stage.groups)


@each_stage
def test_todos_name_groups(stage: Stage) -> None:
    named = set(open_functions((ROOT / stage.skeleton_path).read_text("utf-8")).values())
    assert stage.groups[0].name in named
    assert named <= {group.name for group in stage.groups}


@each_stage
@pytest.mark.full
def test_completed_groups_hold_one_after_another(stage: Stage, tmp_path: Path) -> None:
    """With the functions of the groups up to one, that group holds: no group needs a later function."""
    known = {clause.name: clause for clause in suite.clauses_of(stage.component)}
    reference = registry.load(stage.component, "reference")
    file = tmp_path / stage.skeleton
    for number, group in enumerate(stage.groups, start=1):
        file.write_text(completed(stage, {each.name for each in stage.groups[:number]}), "utf-8")
        implementation = registry.load(stage.component, stage.target(str(file)))
        for verdict in suite.check_implementation(
            [known[name] for name in group.clauses], implementation, reference, shrink_failures=False
        ):
            assert verdict.holds, (group.name, verdict.clause.name, verdict.failure)
