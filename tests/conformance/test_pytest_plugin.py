"""The pytest plugin: an outside project's component is held to its contract by `pytest`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.contract_versions import versions_of

ROOT = Path(__file__).parents[2]
PLUGIN = "diptych.shared.tools.conformance.pytest_plugin"
EXAMPLE = (ROOT / "docs" / "examples" / "my_radix_cache.py").read_text(encoding="utf-8")
BUG = ("upper.lock_ref, lower.parent = lower.lock_ref, upper", "lower.parent = upper")
CACHE = ("--diptych", "my_cache.py:MyRadixCache", "--component", "radix_cache")
NUM_CASES = 1 + sum(len(clause.cases) for clause in suite.clauses_of("radix_cache"))  # with the interface's
SETTINGS = f"""
[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
diptych = ["radix_cache my_cache.py:MyRadixCache {versions_of("radix_cache")[-1]}"]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An outside project with a cache, a test of its own, and the line in its settings."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    files = {"my_cache.py": EXAMPLE, "pyproject.toml": SETTINGS, "tests/test_own.py": "def test_own(): ..."}
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


class Run(NamedTuple):
    status: int
    text: str

    def __getattr__(self, outcome: str) -> int:
        """run.passed: their number, by the last line."""
        found = re.search(rf"(\d+) {outcome}", self.text.splitlines()[-1])
        return int(found[1]) if found else 0


@pytest.fixture
def run(project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """pytest in this process, where torch is imported already."""

    def call(*arguments: str) -> Run:
        status = pytest.main(list(arguments))
        out, err = capsys.readouterr()
        return Run(int(status), out + err)

    return call


def plant(project: Path) -> None:
    assert BUG[0] in EXAMPLE
    (project / "my_cache.py").write_text(EXAMPLE.replace(*BUG), encoding="utf-8")


def test_project_with_a_line_in_its_settings_passes(run: Callable[..., Run]) -> None:
    """With the project's own tests; -k selects among both."""
    result = run("-k", "test_own or split", "-v")
    assert (result.status, result.passed, result.deselected) == (0, 13, NUM_CASES - 12), result.text
    assert "diptych: radix_cache my_cache.py:MyRadixCache\n" in result.text
    assert "tests/test_own.py::test_own PASSED" in result.text
    assert "radix_cache=my_cache.py:MyRadixCache::split-keeps-the-holder[page_4] PASSED" in result.text


def test_paths_leave_the_lines_out_and_a_pair_alone_leaves_the_tests_out(run: Callable[..., Run]) -> None:
    assert run("tests").passed == 1
    copies = (*CACHE, "--diptych-clause", "copies")
    assert (run(*copies).passed, run(*copies, "tests").passed) == (2, 3)  # the interface too


def test_failure_prints_what_check_prints(run: Callable[..., Run], project: Path) -> None:
    """Smallest input of the first failing case; JUnit has the sentence of the clause."""
    plant(project)
    clause = "any-calls"
    result = run(*CACHE, "--diptych-clause", clause, "--junitxml", "out.xml", "-k", "any-calls and page_1")
    assert result.status == 1
    options = ["--clause", clause]
    checked = CliRunner().invoke(app, ["check", "radix_cache", "my_cache.py:MyRadixCache", *options])
    block = checked.stdout[checked.stdout.index(f"\n{clause}\n") + 1 : checked.stdout.index("  also in")]
    shown = result.text.splitlines()
    lines = [line.rstrip() for line in block.splitlines()]
    assert "smallest input" in block
    start = shown.index(lines[0])
    assert shown[start : start + len(lines)] == lines
    (case, *_) = [
        each for each in ElementTree.parse("out.xml").iter("testcase") if each.find("failure") is not None
    ]
    statement = next(each.statement for each in suite.clauses_of("radix_cache") if each.name == clause)
    assert case.find("properties/property").attrib == {"name": "clause", "value": statement}
    assert "smallest input" in case.find("failure").text


def test_bare_functions_are_for_check_kernel(run: Callable[..., Run], project: Path) -> None:
    (project / "mine.py").write_text("def f(q): ...", encoding="utf-8")
    result = run("--diptych", "mine.py:f", "--component", "attention")
    assert result.status == 1
    assert "diptych check kernel FILE.py:NAME --like OPERATION" in result.text
    result = run("--diptych", "mine.py:f", "--component", "rms_norm")
    assert result.status == 4
    assert "diptych check kernel FILE.py:NAME --like rms_norm" in result.text


def test_no_shrink(run: Callable[..., Run], project: Path) -> None:
    plant(project)
    result = run(*CACHE, "--diptych-clause", "any-calls", "--diptych-no-shrink", "-k", "calls_21")
    assert "smallest input" not in result.text
    assert (result.failed, result.deselected) == (1, 96)


def test_refusals_are_skips_with_their_reason(run: Callable[..., Run]) -> None:
    target = ROOT / "docs" / "examples" / "my_paged_decode.py"
    result = run(
        "--diptych",
        f"{target}:MyAttention",
        "--component",
        "attention",
        "--diptych-clause",
        "sliding-window",
        "-rs",
    )
    assert (result.status, result.failed) == (0, 0)
    assert result.skipped > 1
    assert re.search(r"SKIPPED .*refused: .*window", result.text)


def test_a_case_that_does_not_end_fails_and_the_others_are_skipped(
    run: Callable[..., Run], project: Path
) -> None:
    """Two pairs, and modules by name."""
    clause = "lof-takes-the-longest-output-first"
    (project / "mine.py").write_text(
        "from diptych.reference.schedule_policy import SchedulePolicy\n"
        "class Endless(SchedulePolicy):\n"
        "    def order(self, *args):\n"
        "        while True: pass\n"
    )
    result = run(
        *("--diptych", "mine:Endless", "--component", "schedule_policy"),
        *("--diptych", "mine:SchedulePolicy", "--component", "schedule_policy"),
        *("--diptych-clause", clause, "--diptych-time-limit", "0.2", "-rs"),
    )
    assert (result.failed, result.skipped, result.passed) == (1, 1, 4), result.text
    assert "an end within 0.2 s" in result.text
    assert re.search("SKIPPED.*reached the time limit in another case", result.text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (CACHE[:2], "--diptych my_cache.py:MyRadixCache: add --component NAME, one of "),
        ((*CACHE[:3], "radix"), "no contract for 'radix'"),
        ((*CACHE, "--diptych-contract", "99.0"), "contract 99.0 of radix_cache is newer"),
        ((*CACHE, "--diptych-contract", "one"), "a version of a contract is major.minor"),
        ((*CACHE, "--diptych-clause", "copy"), "no clause copy; the clauses are"),
        (("--diptych", "my_cache.py:Mine", *CACHE[2:]), "has no 'Mine'"),
        (
            ("--diptych", "my_cache.py:Node", *CACHE[2:]),
            "is no subclass of diptych.shared.interfaces.PrefixCache",
        ),
        (("-o", "diptych=radix_cache"), "a line of diptych is: component target"),
    ],
    ids=["no component", "component", "newer", "version", "clause", "class", "interface", "line"],
)
def test_what_cannot_be_checked_is_named(
    run: Callable[..., Run], arguments: tuple[str, ...], message: str
) -> None:
    result = run(*arguments)
    assert result.status != 0
    assert message in " ".join(result.text.split())


def test_older_contract_is_a_warning(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.shared.tools.conformance.clauses import contract_versions

    monkeypatch.setattr(contract_versions, "older_than_current", lambda *_: "written for contract 0.9")
    result = run("-k", "test_own")
    assert "OlderContractWarning: written for contract 0.9" in result.text
    assert (result.passed, result.deselected, result.warning) == (1, NUM_CASES, 1)


def test_start_without_a_component_imports_nothing_heavy(project: Path) -> None:
    program = f"import pytest, sys; pytest.main(['tests'], ['{PLUGIN}']); print(sorted(sys.modules))"
    program = program.replace(f"['{PLUGIN}']", "[__import__('importlib').import_module('" + PLUGIN + "')]")
    out = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True).stdout
    assert "1 passed" in out
    assert PLUGIN in out
    assert not re.search(
        r"'(torch|numpy|rich|typer|transformers|diptych\.shared\.registry|diptych\.shared\S+\.suite)'", out
    )


def test_entry_point_names_the_plugin() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points.pytest11]\ndiptych = "{PLUGIN}"\n' in settings


@pytest.mark.full
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "xdist"])
def test_whole_project_in_processes_of_its_own(project: Path, workers: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pytest", *workers]
    passing = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert f"{1 + NUM_CASES} passed" in passing.stdout, passing.stdout
    plant(project)
    command += ["-k", "split or test_own"]
    failing = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert "4 failed, 9 passed" in failing.stdout
    assert "FAILED radix_cache=my_cache.py:MyRadixCache::split-keeps-the-holder[page_1]" in failing.stdout
