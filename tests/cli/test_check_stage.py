"""`diptych check --stage`: what it prints and refuses, and the first failure of a file."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.shared.tools.cli import app
from diptych.shared.tools.commands.check_stage import grade
from diptych.shared.tools.conformance.clauses.stages import stage_of

ROOT = Path(__file__).parents[2]


def test_numbers() -> None:
    assert stage_of("5") is stage_of("05")
    with pytest.raises(ValueError, match=r"no exercise for stage '99'.*05 \(the radix cache\)"):
        stage_of("99")


def test_without_a_file_it_says_what_to_do() -> None:
    result = CliRunner().invoke(app, ["check", "--stage", "05"])
    assert result.exit_code == 0
    assert "cp docs/exercises/my_cache.py my_cache.py" in result.output
    assert "diptych check --stage 05 my_cache.py" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--stage", "99"], "no exercise for stage '99'"),
        (["--stage", "05", "no_such_file.py"], "no such file: no_such_file.py"),
        (["--stage", "05", "a.py", "b.py"], "--stage takes one file"),
        ([], "name a component"),
    ],
)
def test_errors_are_one_line(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output
    assert len(result.output.splitlines()) == 1


def test_a_file_without_the_class_or_the_interface(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match="has no 'MyRadixCache'"):
        grade(stage_of("05"), str(file))
    file.write_text("class MyRadixCache:\n    pass\n")
    result = grade(stage_of("05"), str(file))
    assert result.failed is None
    assert result.failure is not None
    assert result.failure.clause.name == "implements-the-interface"


def test_the_first_failing_group_and_case_are_shown(tmp_path: Path) -> None:
    """A complete cache with a split that loses locks."""
    source = (ROOT / "docs/examples/my_radix_cache.py").read_text(encoding="utf-8")
    file = tmp_path / "my_cache.py"
    file.write_text(
        source.replace("upper.lock_ref, lower.parent = lower.lock_ref, upper", "lower.parent = upper")
    )
    result = CliRunner().invoke(app, ["check", "--stage", "05", str(file)])
    assert result.exit_code == 1
    assert "3 of 8 groups hold" in result.output
    assert "split-keeps-the-holder" in result.output
    assert "any-calls" not in result.output
