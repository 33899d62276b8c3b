"""The site shows each notebook with the outputs that were recorded from it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
from docs.generators.notebooks import OUTPUTS, page_of

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_outputs_are_those_of_the_cells(path: Path) -> None:
    cells = [
        "".join(cell["source"])
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    recorded = json.loads((OUTPUTS / f"{path.stem}.json").read_text(encoding="utf-8"))
    command = f"python -m docs.generators.record_notebooks {path.stem}"
    assert [cell["source"] for cell in recorded] == cells, command
    assert any(cell["outputs"] for cell in recorded)


@each_notebook
def test_page_has_every_cell_and_output(path: Path) -> None:
    page = page_of(path)
    recorded = json.loads((OUTPUTS / f"{path.stem}.json").read_text(encoding="utf-8"))
    outputs = [output for cell in recorded for output in cell["outputs"]]
    assert page.count("~~~python") == len(recorded)
    assert page.count('<img class="output" alt="') == sum("svg" in output for output in outputs)
    for output in outputs:
        assert output.get("text", "").rstrip("\n") in page
    assert page.count("\n# ") == 1 + sum(text.count("\n# ") for text in code_of(page))


def code_of(page: str) -> list[str]:
    return page.split("~~~")[1::2]


def test_every_record_has_a_notebook() -> None:
    assert {path.stem for path in OUTPUTS.glob("*.json")} == {path.stem for path in NOTEBOOKS}


def test_links_lead_to_the_pages() -> None:
    """As `docs/hooks.py` does for sources."""
    from types import SimpleNamespace
    from typing import Any

    from docs.generators.notebooks import on_page_markdown

    files: Any = SimpleNamespace(
        get_file_from_path=lambda path: (
            SimpleNamespace(url=path.removesuffix(".md") + "/") if "05_radix" in path else None
        )
    )
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="course/05.md"), url="course/05/")
    shown = on_page_markdown("`notebooks/05_radix_cache.ipynb`, `notebooks/no_such.ipynb`", page, None, files)
    assert (
        '<a href="../../notebooks/05_radix_cache/"><code>notebooks/05_radix_cache.ipynb</code></a>' in shown
    )
    assert "`notebooks/no_such.ipynb`" in shown
