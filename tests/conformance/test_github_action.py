"""The workflow of forks; the GitHub Action: its inputs are used, its steps well-formed, its commands work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "actions" / "check"
TEXT = (FOLDER / "action.yml").read_text(encoding="utf-8")
ACTION: dict[str, Any] = yaml.safe_load(TEXT)
STEPS: dict[str, dict[str, Any]] = {step["name"]: step for step in ACTION["runs"]["steps"]}
EXAMPLE = (ROOT / "docs" / "examples" / "my_radix_cache.py").read_text(encoding="utf-8")
BUG = ("upper.lock_ref, lower.parent = lower.lock_ref, upper", "lower.parent = upper")


def environment(step: str, **inputs: str) -> dict[str, str]:
    """The step's variables, with the expressions replaced as GitHub replaces them."""
    values = {f"inputs.{name}": str(each["default"]) for name, each in ACTION["inputs"].items()}
    values |= {f"inputs.{name.replace('_', '-')}": value for name, value in inputs.items()}
    values["github.action_path"] = str(FOLDER)
    return {
        name: re.sub(r"\$\{\{ (\S+) \}\}", lambda match: values[match[1]], text)
        for name, text in STEPS[step]["env"].items()
    }


def test_form_of_a_composite_action() -> None:
    assert set(ACTION) == {"name", "description", "inputs", "runs"}
    assert set(ACTION["runs"]) == {"using", "steps"}
    assert ACTION["runs"]["using"] == "composite"
    assert len(STEPS) == len(ACTION["runs"]["steps"])
    for each in ACTION["inputs"].values():
        assert set(each) == {"description", "default"}
        assert isinstance(each["default"], str)
    for step in STEPS.values():
        assert ("uses" in step) != ("run" in step)
        assert set(step) <= {"name", "if", "uses", "with", "shell", "working-directory", "env", "run"}
        assert ("shell" in step) == ("run" in step)  # a composite action has no default shell


def test_every_input_is_used_and_every_expression_exists() -> None:
    used = set(re.findall(r"\$\{\{ (.*?) \}\}", TEXT))
    assert used == {f"inputs.{name}" for name in ACTION["inputs"]} | {"github.action_path"}
    assert all("${{" not in step.get("run", "") for step in STEPS.values()), "an input is no shell code"


def test_commands_are_bash_with_variables_that_the_step_sets() -> None:
    for step in STEPS.values():
        if "run" in step:
            assert set(re.findall(r"\$\{?([A-Z_]+)", step["run"])) == set(step["env"])
            subprocess.run(["bash", "-n", "-c", step["run"]], check=True)


def test_diptych_is_installed_from_the_actions_own_checkout() -> None:
    folder = Path(environment("Install")["DIPTYCH"])
    assert (folder / "pyproject.toml").samefile(ROOT / "pyproject.toml")


def test_forks_run_the_tests_on_the_oldest_python_that_is_supported() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["test"]
    assert job["steps"][-1] == {"run": "make test"}
    oldest = job["strategy"]["matrix"]["python"][0]
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize("has_settings", [True, False], ids=["settings", "inputs"])
def test_the_check_passes_and_fails_in_an_outside_project(tmp_path: Path, has_settings: bool) -> None:
    """With the lines of its settings, and with the action's inputs."""
    line = '[tool.pytest.ini_options]\ndiptych = ["radix_cache my_cache.py:MyRadixCache 1.0"]\n'
    (tmp_path / "pyproject.toml").write_text(line if has_settings else "", encoding="utf-8")
    inputs = {"target": "my_cache.py:MyRadixCache", "component": "radix_cache", "contract": "1.0"}
    plugin = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "diptych.shared.tools.conformance.pytest_plugin",
    }
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    chosen = environment("Check", arguments="-k split", **({} if has_settings else inputs))
    for text, status, num_failures in ((EXAMPLE, 0, "0"), (EXAMPLE.replace(*BUG), 1, "4")):
        (tmp_path / "my_cache.py").write_text(text, encoding="utf-8")
        command = ["bash", "-e", "-o", "pipefail", "-c", STEPS["Check"]["run"]]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **plugin, **paths, **chosen},
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stdout + done.stderr
        (suite,) = ElementTree.parse(tmp_path / "diptych.xml").iter("testsuite")
        assert (suite.attrib["tests"], suite.attrib["failures"]) == ("12", num_failures)
        assert ("split-keeps-the-holder\n" in done.stdout) == bool(status)
