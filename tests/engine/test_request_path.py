"""The code that a reader follows in the reference panel does not get longer: to start an engine, and from a
prompt to its text."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from tests.engine.request_path import ROOT, CodePath

LIMITS = {"start": (54, 178, 0.06), "request": (34, 160, 0.48)}
"""Files, functions, and the least share of reference/."""


@pytest.fixture(scope="module")
def paths() -> dict[str, CodePath]:
    """Both paths, recorded in a process of its own, in which nothing has run before."""
    code = "import pickle, sys, tests.engine.request_path as p; pickle.dump(p.paths(), sys.stdout.buffer)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    found: dict[str, CodePath] = pickle.loads(run.stdout)
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_the_path_stays_short(paths: dict[str, CodePath], name: str) -> None:
    path, (max_files, max_functions, min_share) = paths[name], LIMITS[name]
    assert "reference/scheduler.py" in path.files
    assert len(path.files) <= max_files, sorted(path.files)
    assert len(path.functions) <= max_functions, path.functions
    assert path.share_of_reference >= min_share, path
