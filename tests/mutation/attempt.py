"""One mutant: its file in a copy of the tree, and the tests that reach it in a fork of this process."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.house.tree import ROOT, project_files
from tests.mutation.gpu import GpuTests
from tests.mutation.mutants import Mutant
from tests.mutation.record import Recording, digest

# Tests with processes and limits of time: a failure counts if it repeats.
HURRIED = ("tests/engine/", "tests/grammar/", "tests/parallel/", "tests/server/")
NOTHING_RAN = 5  # pytest's status where no test was left


def copy_tree(tree: Path) -> None:
    """Copy what changed since the last copy, and the links of the package. Compiled modules in the copy
    stay."""
    for link in filter(Path.is_symlink, (ROOT / "diptych").iterdir()):
        target = tree / link.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(link.readlink())
    for name in project_files():
        target = tree / name
        if not target.exists() or target.stat().st_mtime_ns != (ROOT / name).stat().st_mtime_ns:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def run_tests(
    recording: Recording | GpuTests, seconds: int, tree: Path, tests: list[str], *options: str
) -> int:
    """In a fork: run the tests of `tree` in this order, up to the first that fails. Its name goes to the file
    `tree`.killer, what pytest prints to `tree`.txt. Returns pytest's status."""
    import pytest

    os.setsid()
    if recording.memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (recording.memory, recording.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    output = os.open(tree.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    for name in [name for name in sys.modules if name.split(".")[0] in ("diptych", "tests")]:
        del sys.modules[name]  # imported from ROOT
    os.chdir(tree)
    sys.path[0] = str(tree)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    order = {test: number for number, test in enumerate(tests)}

    class InOrder:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                tree.with_suffix(".killer").write_text(report.nodeid)

    modules = [
        name for name in dict.fromkeys(test.split("::")[0] for test in tests) if (tree / name).exists()
    ]
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", recording.marks, *options)
    return int(pytest.main([*options, *modules], plugins=[InOrder()]))


def in_fork(recording: Recording | GpuTests, seconds: int, *args: Any) -> int | None:
    """`run_tests` in a fork. None: it needed more than so many CPU seconds and was killed."""
    end = time.monotonic() + recording.wall * seconds
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = run_tests(recording, seconds, *args)
        finally:
            os._exit(status)
    try:
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return None if code == -signal.SIGXCPU else code
            time.sleep(0.05)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # also processes that a test left behind
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


class Worker:
    """One copy of the tree, in which one mutant at a time is tried."""

    def __init__(self, tree: Path, recording: Recording | GpuTests, budget: float) -> None:
        """`budget`: seconds of tests for one mutant."""
        self.tree, self.recording, self.budget = tree, recording, budget

    def warm_up(self) -> None:
        """Compile every module of the copy: what is compiled with a mutant in place is not kept."""
        copy_tree(self.tree)
        in_fork(self.recording, 600, self.tree, list(self.recording.times), "--collect-only")
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    def attempt(self, mutant: Mutant) -> dict[str, Any]:
        """The result of one mutant, as results.jsonl has it."""
        path, start = self.tree / mutant.path, time.monotonic()
        original, times = path.read_bytes(), path.stat()
        tests = self.recording.tests_for(mutant, digest(original), self.budget)
        killer = self.tree.with_suffix(".killer")
        killer.write_text("")
        status: int | None = NOTHING_RAN
        try:
            path.write_bytes(mutant.apply(original))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10))
            if tests:
                status = self.first_failure(tests, killer)
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return {
            "mutant": mutant.key,
            "file": digest(original),
            "result": {None: "out of time", 0: "survived", NOTHING_RAN: "not reached"}.get(status, "killed"),
            "killer": killer.read_text(),
            "tests": len(tests),
            "seconds": round(time.monotonic() - start, 1),
        }

    def first_failure(self, tests: list[str], killer: Path) -> int | None:
        """The status of the tests up to the first that fails, whose name is in the file `killer`."""
        limit = self.recording.limit(tests)
        status, name = in_fork(self.recording, limit, self.tree, tests), killer.read_text()
        if not name.startswith(HURRIED) or in_fork(self.recording, limit, self.tree, [name]) != 0:
            return status
        rest = tests[tests.index(name) + 1 :]
        killer.write_text("")
        return self.first_failure(rest, killer) if rest else 0
