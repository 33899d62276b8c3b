"""Examples in pages work: Python blocks run, and commands exist with their options."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.clauses import suite

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
MAKE_TARGETS = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
            if match.group(1) == language:
                yield page, match.group(2)


def commands(program: str) -> list[tuple[str, list[str]]]:
    """(page, arguments) of every call of `program` in a shell example."""
    found = []
    for page, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if program in words:
                found.append((page.name, words[words.index(program) + 1 :]))
    return found


PROGRAM: Any = typer.main.get_command(app)
PYTHON_BLOCKS = [(page, code) for page, code in blocks("python") if "--8<--" not in code]


@pytest.mark.parametrize(("page", "code"), PYTHON_BLOCKS, ids=[page.name for page, _ in PYTHON_BLOCKS])
def test_python_example_runs(page: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, page.name, "exec"), {"__name__": "example"})
    output = capsys.readouterr().out.strip()
    assert "42" in output if "12 + 30" in code else output


def test_number_of_clauses_in_the_page() -> None:
    """Including the clause that checks the component's methods."""
    clauses = suite.clauses_of("radix_cache")
    num_cases = sum(len(clause.cases) for clause in clauses)
    says = f"all {len(clauses) + 1} clauses hold, in {num_cases + 1} cases"
    assert says in (ROOT / "docs" / "own-component.md").read_text(encoding="utf-8")


def test_there_are_examples() -> None:
    assert len(PYTHON_BLOCKS) >= 2
    assert len(commands("diptych")) >= 10


@pytest.mark.parametrize(("page", "arguments"), commands("diptych"), ids=lambda value: " ".join(value)[:40])
def test_command_exists_with_its_options(page: str, arguments: list[str]) -> None:
    command, words = PROGRAM, list(arguments)
    while words and hasattr(command, "commands"):
        words = getattr(command, "with_subcommand", list)(words)
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= known


def test_the_moe_example_holds_the_contract() -> None:
    verdicts = suite.check_component("moe", "docs/examples/my_moe.py:MyMoE", shrink_failures=False)
    assert [(each.clause.name, each.case.name) for each in verdicts if not each.holds] == []


def test_make_targets_exist() -> None:
    targets = {word for _, words in commands("make") for word in words if "=" not in word}
    assert targets
    assert targets <= MAKE_TARGETS
