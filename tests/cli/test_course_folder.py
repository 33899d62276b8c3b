"""`diptych course`: the folder, grades that are kept, and the order of grading."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.clauses.stages import STAGES, stage_of
from diptych.shared.tools.course.exercise import NEEDS, fingerprint, skeleton_of, todos_of
from diptych.shared.tools.course.folder import CourseFolder, State
from diptych.shared.tools.course.grading import groups_to_grade

ROOT = Path(__file__).parents[2]
POOL = stage_of("02")
GROUP = POOL.groups[0].name


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["course", *arguments])
    assert result.exit_code == status, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines() if "diptych generate" not in line)
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run("start", str(tmp_path / "mine"))
    return tmp_path / "mine"


def solve(folder: Path, change: tuple[str, str] = ("", "")) -> None:
    """Stage 02, by the reference."""
    text = (ROOT / "reference/memory_pool.py").read_text("utf-8").replace(*change)
    (folder / POOL.skeleton).write_text(text, "utf-8")


def test_start_copies_what_is_missing(folder: Path) -> None:
    for stage in STAGES:
        assert (folder / stage.skeleton).read_text("utf-8") == skeleton_of(stage).read_text("utf-8")
    (folder / POOL.skeleton).write_text("mine = 1\n")
    (folder / STAGES[0].skeleton).unlink()
    assert "1 exercises copied" in " ".join(run("start", str(folder)).split())
    assert (folder / POOL.skeleton).read_text() == "mine = 1\n"


def test_the_way_and_what_is_next(folder: Path) -> None:
    text = run("--folder", str(folder))
    assert f"0 of {len(STAGES)} stages" in text
    first = STAGES[0].groups[0].name
    assert f"Next: {first}, task 1 of {len(STAGES[0].groups)} of stage 01" in " ".join(text.split())
    for stage in STAGES:
        assert stage.title in text
    text = run("show", "2", "--folder", str(folder))
    assert all(group.name in text for group in POOL.groups)
    assert "write " in text


def test_what_a_stage_needs_is_known() -> None:
    assert list(NEEDS) == [stage.number for stage in STAGES]
    assert all(before < number for number, needed in NEEDS.items() for before in needed)


def test_an_open_function_is_named_and_the_hint_is_last(folder: Path) -> None:
    text = run("grade", "02", "--folder", str(folder), status=1)
    assert "not written" in text
    last = " ".join(text.replace("▎", " ").split())
    assert last.endswith(f"{GROUP}: {POOL.groups[0].hint}")


def test_green_groups_are_not_run_again_until_the_code_changes(folder: Path) -> None:
    solve(folder)
    text = run("grade", "02", "--group", GROUP, "--folder", str(folder))
    assert f"✓ {GROUP}" in text
    assert "still open" in text
    learner = CourseFolder.at(folder)
    assert learner.states(POOL)[GROUP] is State.GREEN
    assert GROUP not in [group.name for group in groups_to_grade(learner, POOL)]
    assert groups_to_grade(learner, POOL, again=True) == list(POOL.groups)
    file = folder / POOL.skeleton
    file.write_text("# a comment\n" + file.read_text("utf-8"), "utf-8")
    assert learner.states(POOL)[GROUP] is State.GREEN
    solve(folder, ("if num_reqs > len", "if num_reqs - 1 > len"))
    assert learner.states(POOL)[GROUP] is State.HELD
    assert groups_to_grade(learner, POOL)[0].name == GROUP  # it is quick
    learner.grades["02"]["groups"][GROUP]["seconds"] = 60.0
    assert groups_to_grade(learner, POOL)[-1].name == GROUP
    assert "✗" in run("grade", "02", "--group", GROUP, "--folder", str(folder), status=1)
    assert CourseFolder.at(folder).states(POOL)[GROUP] is State.OPEN


@pytest.mark.full
def test_a_green_stage(folder: Path) -> None:
    solve(folder)
    text = run("grade", "2", "--folder", str(folder))
    assert "is green" in text
    assert f"memory_pool={folder / POOL.skeleton}" in text
    assert "every task is green" in run("grade", "2", "--folder", str(folder))
    assert "1 of 15 stages" in run("--folder", str(folder))


def test_errors_are_one_line(folder: Path) -> None:
    for arguments, place, complaint in (
        ([], folder.parent, "diptych course start FOLDER"),
        (["show", "99"], folder, "no exercise for stage '99'"),
        (["grade", "02", "--group", "nothing"], folder, "stage 02 has no task 'nothing'"),
    ):
        result = CliRunner().invoke(app, ["course", *arguments, "--folder", str(place)])
        assert result.exit_code == 2
        assert complaint in result.output
        assert len(result.output.splitlines()) == 1


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "course.json").write_text("{")
    assert "is damaged" in run_error(folder)
    (folder / "course.json").write_text(json.dumps({"stages": {}, "labs": []}))
    shutil.copy(ROOT / "reference/sampler.py", folder / POOL.skeleton)
    result = CliRunner().invoke(app, ["course", "grade", "02", "--folder", str(folder)])
    assert result.exit_code == 1  # the interface is missing
    assert "every method of its interface" in " ".join(result.output.replace("▎", " ").split())


def run_error(folder: Path) -> str:
    result = CliRunner().invoke(app, ["course", "--folder", str(folder)])
    assert result.exit_code == 2
    return result.output


def test_comments_docstrings_and_layout_do_not_count() -> None:
    source = 'def f(x):\n    """Text."""\n    return x + 1  # why\n'
    assert fingerprint(source) == fingerprint("def f(x):\n    return (x + 1)\n")
    assert fingerprint(source) != fingerprint("def f(x):\n    return x + 2\n")
    assert fingerprint("def (") != fingerprint("def )")


def test_functions_that_are_not_written() -> None:
    (todo,) = todos_of(
        'class A:\n    def f(self):\n        raise NotImplementedError("TODO draw: one a row")\n'
    )
    assert (todo.group, todo.name, todo.line, todo.what) == ("draw", "A.f", 3, "one a row")
