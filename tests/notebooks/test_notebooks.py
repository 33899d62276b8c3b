"""Every notebook runs from top to bottom in a fresh kernel, and is committed without outputs."""

import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[test]'")
nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[test]'")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FAST = ("05_radix_cache",)
RUNS = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in FAST else pytest.mark.full)
    for path in NOTEBOOKS
]


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.parametrize("path", RUNS)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()  # a cell that raises fails the test, with its traceback
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code_cells)
    assert any(cell.outputs for cell in code_cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path: Path) -> None:
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} >= set(FAST)
