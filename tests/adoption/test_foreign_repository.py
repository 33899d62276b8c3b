"""The wheel in a foreign git repository: the pytest plugin, the action's commands and `diptych check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diptych.shared.tools.conformance.ci_reports import Checked, badge, sarif
from tests.conformance.test_github_action import BUG, EXAMPLE, ROOT, STEPS, environment

NORM = """
import torch

def norm(x, shape, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""
CHECKS = [Checked("a.one", "One holds.", [], "server"), Checked("a.two", "Two holds.", ["what: x"], "server")]


def test_reports_for_ci() -> None:
    (run,) = sarif(CHECKS, "diptych check server")["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["a.one", "a.two"]
    (result,) = run["results"]
    assert (result["ruleId"], result["ruleIndex"]) == ("a.two", 1)
    assert result["message"]["text"] == "Two holds. what: x"
    found = badge(CHECKS, "diptych")
    assert (found["message"], found["color"]) == ("1 of 2 fail", "red")
    assert badge(CHECKS[:1], "diptych")["message"] == "1 checks hold"
    assert badge([], "diptych")["color"] == "lightgrey"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel alone, as pip installs it; what it needs comes from this environment."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packed = subprocess.run(
        ["tar", "cf", "-", "-T", "-"], cwd=ROOT, input=listed.encode(), capture_output=True
    )
    subprocess.run(["tar", "xf", "-", "-C", str(source)], input=packed.stdout, check=True)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run(
        [*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(wheels)], check=True
    )
    (wheel,) = wheels.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"diptych"}
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def run(command: list[str], folder: Path, site: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command in another repository, with the wheel's code alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**kept, "PYTHONPATH": str(site), "PATH": path, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.full
def test_the_plugin_is_found_by_its_entry_point(site: Path, repository: Path) -> None:
    line = '[tool.pytest.ini_options]\ndiptych = ["radix_cache my_cache.py:MyRadixCache 1.0"]\n'
    (repository / "pyproject.toml").write_text(line)
    for text, status in ((EXAMPLE, 0), (EXAMPLE.replace(*BUG), 1)):
        (repository / "my_cache.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-k", "split", "--junitxml", "out.xml"]
        done = run(command, repository, site)
        assert done.returncode == status, done.stdout + done.stderr
        (suite,) = ElementTree.parse(repository / "out.xml").iter("testsuite")
        assert suite.attrib["tests"] == "12"


@pytest.mark.full
def test_a_kernel_and_an_engine_are_checked(site: Path, repository: Path) -> None:
    (repository / "norm.py").write_text(NORM)
    (repository / "wrong.py").write_text(NORM.replace(" + eps", ""))
    for name, status in (("norm", 0), ("wrong", 1)):
        done = run(
            [sys.executable, "-m", "diptych", "check", "kernel", f"{name}.py:norm", "--like", "rms_norm"],
            repository,
            site,
        )
        assert done.returncode == status, done.stdout + done.stderr
    few = ["--num-prompts", "4", "--num-tokens", "3", "--device", "cpu", "--json", "gates.json"]
    spec = "reference,dtype=bfloat16"
    done = run([sys.executable, "-m", "diptych", "check", "engine", spec, *few], repository, site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((repository / "gates.json").read_text())["gates"]) == 4


@pytest.mark.full
def test_the_action_runs_a_command(site: Path, repository: Path) -> None:
    (repository / "norm.py").write_text(NORM)
    chosen = environment("Check", command="kernel norm.py:norm --like rms_norm")
    command = ["bash", "-e", "-o", "pipefail", "-c", STEPS["Check"]["run"]]
    done = run(command, repository, site, **chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hold" in done.stdout
