"""The files of docs/deploy name commands and options that exist, and routes that the server has."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from diptych.shared.tools.cli import app

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "docs/deploy").iterdir()), ROOT / "docs/deploy.md", ROOT / "docs/serving.md"]


def commands(text: str) -> list[list[str]]:
    """Words of the `diptych ...` command lines, also of a Dockerfile's entry point."""
    text = text.replace("\\\n", " ")
    entry = re.findall(r'\["\S*/diptych", (.*)\]', text)
    lines = re.findall(r"^(?:ExecStart=\S*/)?diptych (.*?)(?: &| +#.*)?$", text, re.MULTILINE)
    return [shlex.split(line.replace(",", " ")) for line in entry] + [shlex.split(line) for line in lines]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_options_exist(file: Path) -> None:
    group = typer.main.get_command(app)
    for words in commands(file.read_text("utf-8")):
        command = group
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, words


def test_systemd_knows_the_limits_of_the_unit(tmp_path: Path) -> None:
    """systemd ignores what it does not know, with a warning: a misspelt limit is none."""
    unit = (ROOT / "docs/deploy/diptych.service").read_text()
    assert {"LimitNOFILE", "TasksMax", "UMask", "NoNewPrivileges"} <= set(re.findall(r"^(\w+)=", unit, re.M))
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")
    # What is not on this computer: the program, its user and its file.
    unit = re.sub(r"^ExecStart=.*", "ExecStart=/bin/true", unit, flags=re.M)
    unit = re.sub(r"^(User|EnvironmentFile)=.*\n", "", unit, flags=re.M)
    (tmp_path / "diptych.service").write_text(unit)
    done = subprocess.run(
        [analyze, "verify", str(tmp_path / "diptych.service")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
