"""Which tests run which line: recorded once with coverage, read for each mutant.

The file is a pytest plugin (`-p tests.mutation.record`). It runs in every worker of pytest-xdist; processes
that a test starts are measured too, under the name of the test.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import Mutant

CONTEXT = "MUTATION_CONTEXT"
SETTINGS = """\
[run]
data_file = {data}
parallel = true
patch = _exit, fork
relative_files = true
sigterm = true
context = ${{MUTATION_CONTEXT-}}
source = {sources}
"""
SOURCES = ("reference", "optimized", "shared")
# Python imports this module when it starts.
START = """\
import coverage, signal
coverage.process_startup()
if coverage.Coverage.current():
    signal.signal(signal.SIGUSR1, lambda *_: coverage.Coverage.current().save())
"""
SAVE_SECONDS = 0.5  # for a process to write its record
MARKS = "not gpu and not full"
NO_KILLERS = ["tests/conformance/test_mutants.py"]  # tests of tests


def digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def record(tree: Path, folder: Path, tests: str, workers: int) -> int:
    """Run `tests`, a folder or file of `tree`, and add them to the recording in `folder`. Returns pytest's
    exit status. A module that cannot be imported, for want of a package, is left out."""
    import coverage  # which a computer with a GPU may lack: tests.mutation.gpu needs none

    hooks = folder / "hooks"
    hooks.mkdir(parents=True, exist_ok=True)
    (hooks / "sitecustomize.py").write_text(START)
    (hooks / "coveragerc").write_text(SETTINGS.format(data=folder / "coverage", sources=", ".join(SOURCES)))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [hooks, tree, *filter(None, [os.environ.get("PYTHONPATH")])])),
        "COVERAGE_PROCESS_START": str(hooks / "coveragerc"),
        "MUTATION_TIMES": str(folder / "times.json"),
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutation.record", "-p", "no:cacheprovider"]
    command += ["-m", MARKS, "-n", str(workers), "--dist", "worksteal", "--continue-on-collection-errors"]
    command += [tests, *(f"--ignore={name}" for name in NO_KILLERS)]
    status = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
    combined = coverage.Coverage(data_file=str(folder / "coverage"), config_file=str(hooks / "coveragerc"))
    combined.load()
    if list(folder.glob("coverage.*")):  # no part where no test ran
        combined.combine([str(folder)], keep=False)
        combined.save()
    state = recorded(folder)
    names = [path.relative_to(tree) for root in SOURCES for path in (tree / root).rglob("*.py")]
    state["files"] = state["files"] or {str(name): digest((tree / name).read_bytes()) for name in names}
    state["tests"][tests] = status
    (folder / "recorded.json").write_text(json.dumps(state, indent=0))
    return status


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """`files`: path -> digest of its text in the recording; `tests`: folder -> pytest's exit status."""
    path = folder / "recorded.json"
    return json.loads(path.read_text()) if path.exists() else {"files": {}, "tests": {}}


def _switch(name: str) -> None:
    import coverage

    os.environ[CONTEXT] = name  # of processes that are started from here
    measured = coverage.Coverage.current()
    if measured:
        measured.switch_context(name)


_kill = os.kill


def pytest_configure() -> None:
    os.kill = _kill_recorded
    os.register_at_fork(after_in_child=lambda: _switch(os.environ.get(CONTEXT, "")))


def _kill_recorded(pid: int, number: int) -> None:
    """Let a process write its record before it is killed. One that just starts has none yet."""
    if number == signal.SIGKILL and _catches(pid, signal.SIGUSR1):
        _kill(pid, signal.SIGUSR1)
        time.sleep(SAVE_SECONDS)
    _kill(pid, number)


def _catches(pid: int, number: int) -> bool:
    path = Path(f"/proc/{pid}/status")
    lines = path.read_text().splitlines() if path.exists() else []
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _switch(item.nodeid)
    try:
        return (yield)
    finally:
        _switch("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: object, request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """What tests share is recorded for all tests of the module, not for the first one."""
    outer = os.environ.get(CONTEXT, "")
    if fixturedef.scope != "function":  # type: ignore[attr-defined]
        _switch(outer.split("::")[0])
    try:
        return (yield)
    finally:
        _switch(outer)


_times: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _times[report.nodeid] += report.duration
    if report.failed or report.skipped:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The times of the tests that passed, merged into the file."""
    if hasattr(session.config, "workerinput"):
        return
    path = Path(os.environ["MUTATION_TIMES"])
    times = json.loads(path.read_text()) if path.exists() else {}
    times.update({name: round(seconds, 3) for name, seconds in _times.items() if name not in _failed})
    path.write_text(json.dumps(times, indent=0))


# CPU seconds for a mutant: FACTOR times the time that its tests took, and GRACE seconds for their collection.
FACTOR, GRACE = 2, 40


class Recording:
    """What `record` left in a folder."""

    marks = MARKS
    memory: int | None = 6 * 2**30  # bytes that one process may allocate
    wall = 3  # times as long by the clock: other processes compete for the CPU

    def __init__(self, folder: Path) -> None:
        self.times: dict[str, float] = json.loads((folder / "times.json").read_text())
        self.files: dict[str, str] = recorded(folder)["files"]
        import coverage

        self.data = coverage.CoverageData(str(folder / "coverage"))
        self.data.read()
        self.modules: dict[str, list[str]] = defaultdict(list)
        for name in self.times:
            self.modules[name.split("::")[0]].append(name)
        self.lines = cache(self._lines)

    def _lines(self, path: str) -> dict[int, set[str]]:
        """Line number -> names of the tests, and of test modules, that run it."""
        return {
            line: {name for context in contexts for name in context.split("|")} - {""}
            for line, contexts in self.data.contexts_by_lineno(path).items()
        }

    def limit(self, tests: list[str]) -> int:
        """CPU seconds of one mutant."""
        return GRACE + FACTOR * round(sum(self.times[test] for test in tests))

    def tests_for(self, mutant: Mutant, file: str, budget: float) -> list[str]:
        """Names of the tests that run the mutated lines, at most `budget` seconds of them. First comes one
        case of each test function, or of each value of all its parameters but the last: the fastest first.
        Then come the other cases, module by module.

        Of a line that runs at import, and where the recorded file is another than the one with the digest
        `file`, all tests that run the file are taken.
        """
        lines = self.lines(mutant.path)
        if not mutant.at_import and file == self.files.get(mutant.path):
            lines = {n: lines[n] for n in range(mutant.first_line, mutant.last_line + 1) if n in lines}
        names = set().union(*lines.values()) if lines else set()
        names |= {test for name in names for test in self.modules.get(name, [])}
        tests = sorted(names & self.times.keys(), key=self.times.__getitem__)
        firsts: dict[str, str] = {}
        for test in tests:
            firsts.setdefault(test.rpartition("-")[0] or test.split("[")[0], test)
        spent: dict[str, float] = defaultdict(float)
        for test in tests:
            spent[test.split("::")[0]] += self.times[test]
        first = list(firsts.values())
        others = sorted(set(tests) - set(first), key=lambda t: (spent[t.split("::")[0]], self.times[t], t))
        sums = accumulate(self.times[test] for test in first + others)
        return [test for test, total in zip(first + others, sums) if total <= budget] or tests[:1]
