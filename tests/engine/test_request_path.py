"""The path that a reader follows from a prompt to its text in the reference panel does not get longer."""

from __future__ import annotations

from tests.engine.request_path import functions_of_a_request

MAX_FILES = 32
MAX_FUNCTIONS = 160


def test_the_path_of_a_request_stays_short() -> None:
    path = functions_of_a_request()
    files = {file for file, _ in path}
    assert "reference/scheduler.py" in files
    assert len(files) <= MAX_FILES, sorted(files)
    assert len(path) <= MAX_FUNCTIONS, path
