"""`make test` stays short."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import is_fast_cut
from tests.fast_cut import MOST_TESTS, off_diagonal
from tests.house.tree import ROOT

TESTS = """
import os, pytest
@pytest.fixture(scope="module")
def place(tmp_path_factory):
    yield tmp_path_factory.mktemp("place")
    print("torn down", file=open(os.environ["DONE"], "a"))
@pytest.mark.parametrize("i", range(12))
def test_good(i, place, capfd):
    os.system(f"echo {i}")
    assert capfd.readouterr().out == f"{i}\\n"
def test_wrong(): assert 1 == 2
def test_skipped(): pytest.skip("as asked")
def test_dies(): os._exit(7)
def test_behind_it(): pass
"""


def test_it_has_no_more_tests(request: pytest.FixtureRequest) -> None:
    """More values of a grid belong to the whole run: `pytest.param(..., marks=pytest.mark.full)`."""
    if is_fast_cut(request.config):
        files = Counter(item.nodeid.partition("::")[0] for item in request.session.items)
        assert files.total() <= MOST_TESTS, files.most_common(10)


def test_each_value_of_each_axis_is_kept() -> None:
    grid = [SimpleNamespace(callspec=SimpleNamespace(_idlist=[a, b])) for a in "xyz" for b in "pq"]
    left_out = [item.callspec._idlist for item in off_diagonal(grid)]
    assert left_out == [["x", "q"], ["y", "p"], ["z", "p"]]
    assert off_diagonal(grid[1:]) == []  # no whole grid: chosen by hand


def test_forked_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    monkeypatch.setenv("DONE", str(tmp_path / "done"))
    command = f"-m pytest -q -p tests.forked_workers --forks 2 -c {tmp_path}/none.ini {tmp_path}"
    (tmp_path / "none.ini").write_text("[pytest]\n")
    ended = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "2 failed, 13 passed, 1 skipped" in ended.stdout, ended.stdout
    assert "its process has ended with status 7" in ended.stdout
    assert "torn down" in (tmp_path / "done").read_text()


def test_forked_workers_that_are_stopped_end_their_fixtures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = "def test_waits(place):\n    import time; open(os.environ['DONE'], 'a').close(); time.sleep(60)\n"
    fails = "import os\ndef test_a():\n    while not os.path.exists(os.environ['DONE']): pass\n    assert 0"
    (tmp_path / "test_a.py").write_text(TESTS.partition("@pytest.mark")[0] + waits)
    (tmp_path / "test_b.py").write_text(fails)
    monkeypatch.setenv("DONE", str(tmp_path / "done"))
    (tmp_path / "none.ini").write_text("[pytest]\n")
    command = f"-m pytest -x -p tests.forked_workers --forks 2 -c {tmp_path}/none.ini {tmp_path}"
    ended = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=40
    )
    assert "1 failed" in ended.stdout, ended.stdout
    assert "torn down" in (tmp_path / "done").read_text()
