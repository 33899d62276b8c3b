"""The site shows each notebook with the outputs that were recorded from it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
from docs.generators import record_notebooks
from docs.generators.notebook_pages import _colab_link, page_of
from docs.generators.record_notebooks import FOLDER, HEADING, digest, gpu_cells, name_of
from notebooks.gpu import record, recorded

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
GPU_CELLS = {path: gpu_cells(path) for path in NOTEBOOKS}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def sources_of(path: Path) -> list[tuple[str, str]]:
    """(code or markdown, source) of each cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


@each_notebook
def test_page_has_every_cell_with_its_recorded_output(path: Path) -> None:
    cells = [source for kind, source in sources_of(path) if kind == "code" and name_of(source) is None]
    found = json.loads((FOLDER / f"{path.stem}.json").read_text(encoding="utf-8"))
    digests = [digest(source) for source in cells]
    assert [cell["digest"] for cell in found] == digests, f"docs.generators.record_notebooks {path.stem}"
    assert any(cell["outputs"] for cell in found)
    page, gpu = page_of(path), GPU_CELLS[path]
    shown = gpu if any(name in record() for name in gpu) else {}
    assert page.count("~~~python") == len(cells) + len(shown)
    assert (HEADING in page) == bool(shown)
    assert all(recorded(name).rstrip("\n") in page for name in shown)
    outputs = [output for cell in found for output in cell["outputs"]]
    assert page.count('<img class="output" alt="') == sum("svg" in output for output in outputs)
    assert all(output.get("text", "").rstrip("\n") in page for output in outputs)
    assert sum("\n# " in text for text in page.split("~~~")[::2]) == 1


def test_every_record_has_a_notebook() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {path.stem for path in NOTEBOOKS}


def test_gpu_cells_run_alone(tmp_path: Path) -> None:
    """Each runs in a process of its own."""
    cells = [cell for gpu in GPU_CELLS.values() for cell in gpu.items()]
    assert len(cells) == len(dict(cells)), "two GPU cells of one name"
    for name, source in cells:
        (tmp_path / f"{name.replace(' ', '_')}.py").write_text(source, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", str(tmp_path)]
    result = subprocess.run(ruff, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert record_notebooks.run("n = 2\ndef square(x):\n    return x * n\nprint(square(3))") == "6\n"
    found = {name: cell["digest"] for name, cell in record().items()}
    known = {name: digest(source) for name, source in cells}
    assert found.items() <= known.items(), "python -m docs.generators.record_notebooks --gpu"
    assert all({"text", "gpu", "torch", "date"} < set(cell) for cell in record().values())


@each_notebook
def test_gpu_cells_are_the_last_section_and_all_recorded_or_none(path: Path) -> None:
    letters = [
        "h" if source.startswith(HEADING) else "g" if name_of(source) else "c"
        for kind, source in sources_of(path)
        if kind == "code" or source.startswith(HEADING)
    ]
    assert re.fullmatch("c+(hg+)?", "".join(letters))
    assert len({name in record() for name in GPU_CELLS[path]}) <= 1


def test_colab_opens_notebooks_of_github() -> None:
    link = _colab_link("05_radix_cache", "https://github.com/someone/diptych")
    assert "/github/someone/diptych/blob/main/notebooks/05_radix_cache.ipynb" in link
    assert _colab_link("05_radix_cache", "https://example.org/diptych") == ""
    assert _colab_link("05_radix_cache", "") == ""
