"""The campaign itself: what it changes, how it tries a change, and the list of equivalent mutants."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.test_contracts import cases
from tests.house.tree import ROOT
from tests.mutation import gpu
from tests.mutation import record as record_module
from tests.mutation.__main__ import EQUIVALENT, sample, survivors, table
from tests.mutation.attempt import Worker, copy_tree
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.record import SOURCES, Recording, record, recorded

SOURCE = b'''
SIZE: int = 4

def clip(x: "int | None", low=0):
    """The docstring 1 + 1 stays."""
    assert x + 1, f"{x + 1}"
    while x < low and not x in (5, low):
        x += 1
    if x is None:
        raise ValueError(x - 1)
    log(x)
    return min(x, -low)

@triton.jit
def kernel(x):
    return x + 1
'''


def changes(source: bytes) -> list[tuple[str, str, str]]:
    return [(m.function, m.old, m.new) for m in mutants_of("a.py", source)]


def test_what_is_changed() -> None:
    assert changes(SOURCE) == [
        ("", "4", "5"),
        ("clip", "0", "1"),
        ("clip", "x < low and not x in (5, low)", "(not (x < low and not x in (5, low)))"),
        ("clip", "<", "<="),
        ("clip", "and", "or"),
        ("clip", "not x in (5, low)", "(x in (5, low))"),
        ("clip", "in", "not in"),
        ("clip", "5", "6"),
        ("clip", "+", "-"),
        ("clip", "1", "2"),
        ("clip", "is", "is not"),
        ("clip", "raise ValueError(x - 1)", "pass"),
        ("clip", "log(x)", "pass"),
        ("clip", "return min(x, -low)", "return None"),
        ("clip", "min", "max"),
        ("clip", "-low", "(low)"),
    ]


def test_a_mutant_is_valid_and_knows_its_lines() -> None:
    for mutant in mutants_of("a.py", SOURCE):
        compile(mutant.apply(SOURCE), "a.py", "exec")
        assert mutant.old.encode() == SOURCE[mutant.start : mutant.end]
    lines = {m.old: (m.first_line, m.last_line, m.at_import) for m in mutants_of("a.py", SOURCE)}
    assert lines["4"] == (2, 2, True)
    assert lines["0"] == (4, 4, True)  # a default is computed when the function is defined
    assert lines["<"] == (7, 7, False)  # the head of the loop


def test_its_name_stays_when_lines_move() -> None:
    moved = SOURCE.replace(b"def clip", b"# a comment\nNAME = 'a'\n\ndef clip")
    assert [m.key for m in mutants_of("a.py", moved)] == [m.key for m in mutants_of("a.py", SOURCE)]


class FakeRecording(Recording):
    def __init__(self) -> None:
        self.times = {"test_double.py::test_double": 0.1}

    def tests_for(self, mutant: Mutant, file: str, budget: float) -> list[str]:
        return list(self.times)


@pytest.mark.full
def test_a_copy_of_the_tree_imports_its_own_panels(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    command = [sys.executable, "-c", "import diptych.optimized.sampler as s; print(s.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(run.stdout.strip()).is_relative_to(tmp_path)


@pytest.mark.full  # starts pytest in a fork for each mutant
def test_a_mutant_is_killed_survives_or_runs_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "GRACE", 5)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # as a worker's process does
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the engine's takes seconds to import
    source = (
        "def double(x):\n    i = 0\n    while i < x:\n        i += 1\n    return 2 * i if x > -1 else 0\n"
    )
    (tmp_path / "double.py").write_text(source)
    (tmp_path / "test_double.py").write_text(
        "from double import double\ndef test_double(): assert double(3) == 6\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  full\n")
    worker = Worker(tmp_path, FakeRecording(), 1.0)
    expected = {"* -> / #0": "killed", "0 -> 1 #1": "survived", "+ -> - #0": "out of time"}
    mutants = {m.key.split(": ")[1]: m for m in mutants_of("double.py", source.encode())}
    assert {name: worker.attempt(mutants[name])["result"] for name in expected} == expected
    assert (tmp_path / "double.py").read_text() == source


@pytest.mark.full  # starts pytest with two workers
def test_a_recording_leaves_out_what_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "build"
    for name in SOURCES:
        (tmp_path / name).mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("")
    (tmp_path / "shared" / "double.py").write_text("def double(x):\n    return 2 * x\n")
    for name in ("good", "broken"):
        (tmp_path / "mine" / name).mkdir(parents=True)
    test = "from shared.double import double\ndef test_double(): assert double(3) == 6\n"
    (tmp_path / "mine" / "good" / "test_double.py").write_text(test)
    (tmp_path / "mine" / "good" / "test_other.py").write_text("import no_such_package\n")
    (tmp_path / "mine" / "broken" / "conftest.py").write_text("import no_such_package\n")
    assert record(tmp_path, folder, "mine/broken", 2) != 0
    assert record(tmp_path, folder, "mine/good", 2) != 0
    assert set(recorded(folder)["tests"]) == {"mine/broken", "mine/good"}
    recording = Recording(folder)
    assert list(recording.times) == ["mine/good/test_double.py::test_double"]
    assert recording.lines("shared/double.py")[2] == {"mine/good/test_double.py::test_double"}


def test_the_tests_of_gpu_code_exist_and_cover_its_files() -> None:
    clauses = {f"tests/conformance/test_contracts.py::test_clause[{case.id}]" for case in cases()}
    for name in {name for names in gpu.TESTS.values() for name in names}:
        file, _, test = name.partition("::")
        assert (f"def {test.partition('[')[0]}(" if test else "def test_") in (ROOT / file).read_text()
        assert name in clauses or "test_contracts" not in file
    assert all((ROOT / path).exists() for path in gpu.TESTS)
    mutants = sample(gpu.FOLDERS, 10**6, seed=0)
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 500


def test_the_fastest_tests_of_a_gpu_mutant_come_first(tmp_path: Path) -> None:
    failed, *passed = gpu.STREAMS
    times = {name: 3.0 - i / 10 for i, name in enumerate(passed)}
    (tmp_path / "times.json").write_text(json.dumps(times))
    tests = gpu.GpuTests(tmp_path)
    mutant = next(m for m in sample(["optimized/overlap/"], 1, 0))
    assert tests.tests_for(mutant, "", 1000.0) == passed[::-1]
    assert tests.tests_for(mutant, "", 6.0) == passed[:-3:-1]
    assert failed not in tests.tests_for(mutant, "", 1000.0)


def test_the_table_counts_lines_without_a_test_unless_they_need_a_gpu() -> None:
    mutants = [
        Mutant(path, "f", 0, 1, "a", "b", 1, 1, False)
        for path in ("optimized/x.py", "optimized/y.py", "reference/x.py", "reference/y.py")
    ]
    results = dict(zip((m.key for m in mutants), ({"result": r} for r in ("not reached", "killed") * 2)))
    rows = [line.replace(" ", "").strip("|").split("|") for line in table(mutants, results).splitlines()[2:]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("optimized", "100.0%"),
        ("reference", "50.0%"),
        ("all", "66.7%"),
    ]


def test_survivors_are_shown_as_diffs() -> None:
    paths = {key.split("::")[0] for key in json.loads(EQUIVALENT.read_text())}
    mutants = [m for path in sorted(paths) for m in mutants_of(path, (ROOT / path).read_bytes())]
    first = next(m for m in mutants if m.key not in json.loads(EQUIVALENT.read_text()))
    text = survivors(mutants, {first.key: {"result": "survived", "tests": 3}})
    assert text.startswith(f"## {json.dumps(first.key)}\n\nsurvived, 3 tests\n\n```diff\n--- {first.path}")
    assert text.count("## ") == 1


def test_every_equivalent_mutant_exists_and_has_a_reason() -> None:
    entries = json.loads(EQUIVALENT.read_text())
    paths = {key.split("::")[0] for key in entries}
    assert set(entries) <= {m.key for path in paths for m in mutants_of(path, (ROOT / path).read_bytes())}
    assert all(len(reason) > 20 for reason in entries.values())
