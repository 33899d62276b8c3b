"""Examples in pages and in docs/deploy work: Python blocks run, and commands exist with their options."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.clauses import suite

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
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


def deployed() -> list[tuple[str, list[str]]]:
    """(file, arguments) of the program in the unit of systemd and in the image."""
    unit = re.findall(r"^ExecStart=\S*/diptych (.*)$", (DEPLOY / "diptych.service").read_text(), re.MULTILINE)
    image = re.findall(
        r'^ENTRYPOINT \["\S*/diptych", (.*)\]$', (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    assert len(unit) == len(image) == 1
    words = {"diptych.service": unit[0], "Dockerfile": image[0].replace(",", " ")}
    return [(file, shlex.split(each)) for file, each in words.items()]


PROGRAM: Any = typer.main.get_command(app)
PYTHON_BLOCKS = [(page, code) for page, code in blocks("python") if "--8<--" not in code]


@pytest.mark.parametrize(("page", "code"), PYTHON_BLOCKS, ids=[page.name for page, _ in PYTHON_BLOCKS])
def test_python_example_runs(page: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = code.replace("range(12)", "range(1)")  # a measurement
    exec(compile(code, page.name, "exec"), {"__name__": "example"})
    output = capsys.readouterr().out.strip()
    assert "42" in output if "12 + 30" in code else output


def test_number_of_clauses_in_the_page() -> None:
    """Including the clause that checks the component's methods."""
    clauses = suite.clauses_of("radix_cache")
    num_cases = sum(len(clause.cases) for clause in clauses)
    says = f"all {len(clauses) + 1} clauses hold, in {num_cases + 1} cases"
    assert says in (ROOT / "docs" / "own-component.md").read_text(encoding="utf-8")


def test_commands_exist_with_their_options() -> None:
    calls = [*commands("diptych"), *deployed()]
    assert len(calls) >= 10
    wrong = []
    for page, words in calls:
        command, rest = PROGRAM, list(words)
        while rest and hasattr(command, "commands"):
            rest = getattr(command, "with_subcommand", list)(rest)
            command = command.commands.get(rest.pop(0))
        known = {
            name for option in getattr(command, "params", ()) for name in option.opts + option.secondary_opts
        }
        used = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        wrong += [f"{page}: {' '.join(words)}"] * (command is None or not used <= known)
    assert wrong == []


@pytest.mark.full
def test_the_moe_example_holds_the_contract() -> None:
    verdicts = suite.check_component("moe", "docs/examples/my_moe.py:MyMoE", shrink_failures=False)
    assert [(each.clause.name, each.case.name) for each in verdicts if not each.holds] == []


def test_make_targets_exist() -> None:
    targets = {word for _, words in commands("make") for word in words if "=" not in word}
    assert targets
    assert targets <= MAKE_TARGETS


def test_systemd_knows_the_limits_of_the_unit(tmp_path: Path) -> None:
    """systemd ignores what it does not know, with a warning: a misspelt limit is none."""
    unit = (DEPLOY / "diptych.service").read_text()
    assert {"LimitNOFILE", "TasksMax", "UMask", "NoNewPrivileges"} <= set(re.findall(r"^(\w+)=", unit, re.M))
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")
    # What is not on this computer: the program, its user and its file.
    unit = re.sub(r"^ExecStart=.*", "ExecStart=/bin/true", unit, flags=re.M)
    unit = re.sub(r"^(User|EnvironmentFile)=.*\n", "", unit, flags=re.M)
    file = tmp_path / "diptych.service"
    file.write_text(unit)
    done = subprocess.run([analyze, "verify", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
