"""Runs the notebooks and writes their outputs, which the site shows: docs/samples/notebooks/, one file each.

    python -m docs.generators.record_notebooks                  # all: about five minutes
    python -m docs.generators.record_notebooks 05_radix_cache   # some
    python -m docs.generators.record_notebooks --gpu            # GPU cells not yet recorded, on a GPU
    python -m docs.generators.record_notebooks --gpu launches   # some GPU cells, by name

A file has the source and the outputs of each code cell: texts, and pictures as SVG. Times depend on the
computer. GPU cells need no Jupyter and have a file of their own, docs/samples/gpu-cells.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from docs.generators import gpu_cells

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
FOLDER = ROOT / "docs" / "samples" / "notebooks"

PREPARE = """
%config InlineBackend.figure_formats = ["svg"]
import matplotlib
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "diptych"})
"""
"""Run before the cells of a notebook that draws."""


def record(path: Path) -> list[dict[str, Any]]:
    """The source and the outputs of each code cell, run from top to bottom in a fresh kernel. GPU cells are
    left out."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if gpu_cells.name_of(cell.source) is None]
    if "drawing" in path.read_text(encoding="utf-8"):
        notebook.cells.insert(0, nbformat.v4.new_code_cell(PREPARE))
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source != PREPARE]
    return [{"source": cell.source, "outputs": outputs_of(cell)} for cell in cells]


def outputs_of(cell: Any) -> list[dict[str, str]]:
    """Texts and pictures in order; neighboring texts become one. What goes to stderr is left out."""
    found: list[dict[str, str]] = []
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            found.append({"svg": data["image/svg+xml"]})
            continue
        text = data.get("text/plain", "")
        if output.output_type == "stream":
            text = output.text if output.name == "stdout" else ""
        if text and found and "text" in found[-1]:
            found[-1]["text"] += text
        elif text:
            found.append({"text": text})
    return found


def main(names: list[str]) -> None:
    if names[:1] == ["--gpu"]:
        gpu_cells.record(names[1:])
        return
    paths = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    wrong = sorted(set(names) - set(paths))
    if wrong:
        raise SystemExit(f"no notebook {', '.join(wrong)}; there are {', '.join(paths)}")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    FOLDER.mkdir(exist_ok=True)
    for name in names or paths:
        start = time.perf_counter()
        text = json.dumps(record(paths[name]), indent=1, ensure_ascii=False).replace(f"{ROOT}/", "")
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
