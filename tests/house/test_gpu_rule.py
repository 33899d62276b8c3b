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
TWO_GPUS = """
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(2)]

def test_needs_two():
    assert True
"""
TORCH_STAND_IN = """
class cuda:
    device_count = staticmethod(lambda: {num_gpus})
    is_available = staticmethod(lambda: {has_gpu})

class default_generator:
    manual_seed = staticmethod(lambda seed: None)

def manual_seed(seed): ...
def set_num_threads(count): ...
"""
STAND_INS = {  # what fixtures of the session patch
    "diptych/shared/loading/kv_sizing": "MAX_CPU_TOKENS = 65_536",
    "diptych/shared/engine/processes/child": "multiprocessing = None",
    "tests/forked": "FORKED = {}",
}


def run_pytest(tmp_path: Path, case: str, num_gpus: int) -> tuple[str, str]:
    """The last line, and all that pytest prints."""
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_case.py").write_text(case)
    (tmp_path / "torch.py").write_text(TORCH_STAND_IN.format(num_gpus=num_gpus, has_gpu=num_gpus > 0))
    for module, text in STAND_INS.items():
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        for folder in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  gpu: needs a GPU\n  gpus(n): needs several\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    return result.stdout.splitlines()[-1], result.stdout + result.stderr


@pytest.mark.parametrize(("num_gpus", "outcome"), [(1, "1 failed, 1 passed"), (0, "1 passed, 1 skipped")])
def test_skipped_gpu_test_fails_only_where_a_gpu_is(tmp_path: Path, num_gpus: int, outcome: str) -> None:
    last, said = run_pytest(tmp_path, CASE, num_gpus)
    assert outcome in last, said
    assert ("although a CUDA GPU is present" in said) == (num_gpus > 0)


@pytest.mark.parametrize(("num_gpus", "outcome"), [(0, "1 deselected"), (1, "1 deselected"), (2, "1 passed")])
def test_what_needs_two_gpus_is_deselected_with_one(tmp_path: Path, num_gpus: int, outcome: str) -> None:
    last, said = run_pytest(tmp_path, TWO_GPUS, num_gpus)
    assert outcome in last, said
