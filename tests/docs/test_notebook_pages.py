"""The site shows each notebook with the outputs that were recorded from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
from docs.generators import gpu_cells, notebook_pages
from docs.generators.notebook_pages import OUTPUTS, page_of
from notebooks.gpu import record, recorded

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_outputs_are_those_of_the_cells(path: Path) -> None:
    cells = [
        "".join(cell["source"])
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code" and gpu_cells.name_of("".join(cell["source"])) is None
    ]
    found = json.loads((OUTPUTS / f"{path.stem}.json").read_text(encoding="utf-8"))
    command = f"python -m docs.generators.record_notebooks {path.stem}"
    assert [cell["source"] for cell in found] == cells, command
    assert any(cell["outputs"] for cell in found)


@each_notebook
def test_page_has_every_cell_and_output(path: Path) -> None:
    page = page_of(path)
    cells = json.loads((OUTPUTS / f"{path.stem}.json").read_text(encoding="utf-8"))
    outputs = [output for cell in cells for output in cell["outputs"]]
    gpu = gpu_cells.gpu_cells(path)
    shown = gpu if any(name in record() for name in gpu) else {}
    assert page.count("~~~python") == len(cells) + len(shown)
    assert (gpu_cells.HEADING in page) == bool(shown)
    for name in shown:
        assert recorded(name).rstrip("\n") in page
    assert page.count('<img class="output" alt="') == sum("svg" in output for output in outputs)
    for output in outputs:
        assert output.get("text", "").rstrip("\n") in page
    assert page.count("\n# ") == 1 + sum(text.count("\n# ") for text in code_of(page))


def code_of(page: str) -> list[str]:
    return page.split("~~~")[1::2]


def test_every_record_has_a_notebook() -> None:
    assert {path.stem for path in OUTPUTS.glob("*.json")} == {path.stem for path in NOTEBOOKS}


def all_gpu_cells() -> dict[str, str]:
    found = [item for path in NOTEBOOKS for item in gpu_cells.gpu_cells(path).items()]
    assert len(found) == len(dict(found)), "two GPU cells of one name"
    return dict(found)


def test_gpu_cells_run_alone(tmp_path: Path) -> None:
    """`gpu_cells.record` runs each in a namespace of its own."""
    for name, source in all_gpu_cells().items():
        (tmp_path / f"{name.replace(' ', '_')}.py").write_text(source, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", str(tmp_path)]
    result = subprocess.run(ruff, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@each_notebook
def test_gpu_cells_are_the_last_section(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    starts = [i for i, source in enumerate(sources) if source.startswith(gpu_cells.HEADING)]
    assert len(starts) == bool(gpu_cells.gpu_cells(path))
    before = sources[: starts[0]] if starts else sources
    assert not any(gpu_cells.name_of(source) for source in before)
    assert all(
        gpu_cells.name_of(source)
        for cell, source in zip(cells, sources)
        if cell["cell_type"] == "code" and source not in before
    )


def test_gpu_record_is_of_these_cells() -> None:
    """Cells without a record are of notebooks that have none recorded: their pages leave the section out."""
    cells, found = all_gpu_cells(), {name: cell["source"] for name, cell in record().items()}
    assert found.items() <= cells.items(), "python -m docs.generators.record_notebooks --gpu"
    assert all({"text", "gpu", "torch", "date"} < set(cell) for cell in record().values())
    for path in NOTEBOOKS:
        assert len({name in found for name in gpu_cells.gpu_cells(path)}) <= 1, path.stem


def test_a_gpu_cell_is_run_and_its_output_kept() -> None:
    assert gpu_cells.run("n = 2\ndef square(x):\n    return x * n\nprint(square(3))") == "6\n"


def test_colab_opens_notebooks_of_github() -> None:
    link = notebook_pages._colab_link("05_radix_cache", "https://github.com/someone/diptych")
    assert "/github/someone/diptych/blob/main/notebooks/05_radix_cache.ipynb" in link
    assert notebook_pages._colab_link("05_radix_cache", "https://example.org/diptych") == ""
    assert notebook_pages._colab_link("05_radix_cache", "") == ""
