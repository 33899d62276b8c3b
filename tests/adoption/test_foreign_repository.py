"""The wheel in another git repository: `diptych check`, its reports for CI, the pytest plugin, the action."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.ci_reports import Checked, CiReport
from tests.adoption.conftest import run
from tests.conformance.test_github_action import BUG, EXAMPLE, STEPS
from tests.conformance.test_github_action import environment as variables_of

NORM = """
import torch

def norm(x, shape, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""
CHECKS = [
    Checked("a.one", "One holds.", [], "server"),
    Checked("a.two", "Two holds.", ["x\nwhat: \0y"], "server", "a"),
    Checked("a.three", "Three holds.", skipped="not offered"),
    Checked("a.four", "Four holds.", not_run="the server is gone"),
]


def test_reports_for_ci() -> None:
    report = CiReport("diptych check server", {"seed": "7"}, CHECKS)
    (found,) = report.sarif()["runs"]
    assert [rule["id"] for rule in found["tool"]["driver"]["rules"]] == ["a.one", "a.two", "a.four"]
    first, second = found["results"]
    assert (first["ruleId"], first["ruleIndex"]) == ("a.two", 1)
    assert second["message"]["text"] == "the server is gone\nmust hold: Four holds."
    suite = ElementTree.fromstring(report.junit().partition("\n")[2])
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["4", "1", "1", "1"]
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert (failure.get("message"), failure.text) == ("x", "x\nwhat: \ufffdy\nmust hold: Two holds.")
    assert [(each.get("name"), each.get("value")) for each in suite.iter("property")] == [("seed", "7")]


@pytest.mark.parametrize(
    ("checks", "message", "color"),
    [
        (CHECKS, "1 of 3 fail, 1 did not run", "red"),
        (CHECKS[:2], "1 of 2 fail", "red"),
        (CHECKS[:1], "1 check holds", "brightgreen"),
        (CHECKS[2:3], "nothing checked", "lightgrey"),
    ],
)
def test_badges(checks: list[Checked], message: str, color: str) -> None:
    badge = CiReport("diptych check server", {}, checks).badge()
    assert (badge["message"], badge["color"]) == (message, color)


def test_the_list_of_what_can_be_checked_fits_a_screen() -> None:
    for arguments in (["--list"], ["kernel", "--list"]):
        lines = CliRunner().invoke(app, ["check", *arguments]).output.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 110


@pytest.mark.full
def test_a_repository_checks_its_code(environment: Path, tmp_path: Path) -> None:
    """A kernel with each report, a component as tests of pytest, an engine, and the action's command."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    (tmp_path / "norm.py").write_text(NORM)
    (tmp_path / "wrong.py").write_text(NORM.replace(" + eps", ""))
    files = [text for name in ("junit", "sarif", "badge", "html", "json") for text in (f"--{name}", name)]
    for name, status in (("norm", 0), ("wrong", 1)):
        command = ["diptych", "check", "kernel", f"{name}.py:norm", "--like", "rms_norm", *files]
        done = run(*command, cwd=tmp_path, status=status, PATH=path)
        suite = ElementTree.parse(tmp_path / "junit").getroot()
        (found,) = json.loads((tmp_path / "sarif").read_text())["runs"]
        badge = json.loads((tmp_path / "badge").read_text())
        num_failing = int(suite.get("failures", ""))
        assert (num_failing > 0) == bool(found["results"]) == (badge["color"] == "red") == bool(status)
        for each in found["results"]:
            place = each["locations"][0]["physicalLocation"]
            assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == (f"{name}.py", 4)
        assert ("eps" in (tmp_path / "junit").read_text()) == bool(status)
        assert "<svg" in (tmp_path / "html").read_text() or status
        assert done.stdout.splitlines()[-1] == json.loads((tmp_path / "json").read_text())["summary"]

    settings = '[tool.pytest.ini_options]\ndiptych = ["radix_cache my_cache.py:MyRadixCache 1.0"]\n'
    (tmp_path / "pyproject.toml").write_text(settings)
    for text, status in ((EXAMPLE, 0), (EXAMPLE.replace(*BUG), 1)):
        (tmp_path / "my_cache.py").write_text(text)
        command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "split"]
        run(*command, "--junitxml", "out.xml", cwd=tmp_path, status=status, PATH=path)
        (suite,) = ElementTree.parse(tmp_path / "out.xml").iter("testsuite")
        assert suite.attrib["tests"] == "12"

    few = ["--num-prompts", "4", "--num-tokens", "3", "--device", "cpu", "--junit", "gates.xml"]
    run("diptych", "check", "engine", "reference,dtype=bfloat16", *few, cwd=tmp_path, PATH=path)
    assert ElementTree.parse(tmp_path / "gates.xml").getroot().attrib["tests"] == "4"

    (tmp_path / "my_cache.py").write_text(EXAMPLE)
    for command, status, tests in (
        ("kernel norm.py:norm --like rms_norm --case float32 --no-timing", 0, "12"),
        ("kernel wrong.py:norm --like rms_norm --case float32 --no-timing", 1, "12"),
        ("radix_cache my_cache.py:MyRadixCache --clause empty-key", 0, "2"),
    ):
        step = ["bash", "-e", "-o", "pipefail", "-c", STEPS["Check"]["run"]]
        run(*step, cwd=tmp_path, status=status, **variables_of("Check", command=command), PATH=path)
        assert ElementTree.parse(tmp_path / "diptych.xml").getroot().attrib["tests"] == tests
