"""The command that a green stage prints runs an engine that calls the learner's part."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage
from diptych.shared.tools.course.exercise import FLAGS
from diptych.shared.tools.course.folder import CourseFolder
from diptych.shared.tools.course.screen import command_with
from tests.labs.record_engines import text_of

ROOT = Path(__file__).parents[2]

SPIES = """

def _spied(owner, name, function):
    import functools

    @functools.wraps(function)
    def spy(*args, **kwargs):
        with open({calls!r}, "a") as file:
            file.write(name + "\\n")
        return function(*args, **kwargs)

    setattr(owner, name, spy)


def _spy():
    import inspect
    import sys

    module = sys.modules[__name__]
    for owner in [module, *(each for each in vars(module).values() if inspect.isclass(each))]:
        if owner is module or owner.__module__ == __name__:
            for name, function in list(vars(owner).items()):
                if inspect.isfunction(function) and not name.startswith("_"):
                    _spied(owner, name, function)


_spy()
"""
"""Behind the code of a part: each call of a public function or method is a line of the file `calls`."""


def text_alone(output: str) -> str:
    """The answer of `diptych generate`, without its last line, which has times."""
    answer = output.rstrip().rpartition("\n")[0]
    assert answer
    return answer


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.number)
def test_the_engine_calls_the_part(stage: Stage, tmp_path: Path) -> None:
    learner, _ = CourseFolder.start(tmp_path / "my folder")
    calls = tmp_path / "calls"
    calls.touch()
    learner.file_of(stage).write_text(text_of(stage) + SPIES.format(calls=str(calls)), "utf-8")
    _, *words = shlex.split(command_with(learner, stage))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    if "dummy" in words:  # random weights: the text is that of the reference
        words[words.index("--use") + 1] = f"{stage.component}=reference"
        own, expected = (text_alone(each) for each in (result.output, CliRunner().invoke(app, words).output))
        assert own == expected
    else:
        assert "42" in result.output
    assert calls.read_text().split()


def test_pages_have_the_flags_of_the_commands() -> None:
    for stage in STAGES:
        page = (ROOT / "docs" / "course" / stage.page).read_text("utf-8").replace("\\\n", " ")
        lines = [" ".join(line.split()) for line in page.splitlines() if line.startswith("diptych generate")]
        commands = [line for line in lines if f"--use {stage.component}=" in line]
        assert commands, stage.number
        assert all(FLAGS.get(stage.number, "") in line for line in commands), stage.number
