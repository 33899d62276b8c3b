"""The rule of tests/conftest.py: a GPU test that skips itself fails where a GPU is present."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
CASE = """
import pytest

@pytest.mark.gpu
def test_needs_something_that_is_not_there():
    pytest.importorskip("no_such_kernel_library")

def test_plain():
    assert True
"""
TORCH_STAND_IN = """
class cuda:
    is_available = staticmethod(lambda: {has_gpu})

def manual_seed(seed): ...
def set_num_threads(count): ...
"""


@pytest.mark.parametrize(
    ("has_gpu", "outcome"), [(True, "1 failed, 1 passed"), (False, "1 passed, 1 skipped")]
)
def test_skipped_gpu_test_fails_only_where_a_gpu_is(tmp_path: Path, has_gpu: bool, outcome: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_case.py").write_text(CASE)
    (tmp_path / "torch.py").write_text(TORCH_STAND_IN.format(has_gpu=has_gpu))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert outcome in result.stdout.splitlines()[-1], result.stdout + result.stderr
    assert ("although a CUDA GPU is present" in result.stdout) == has_gpu
