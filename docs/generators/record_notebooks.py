"""Runs the notebooks and writes their outputs, which the site shows: docs/samples/notebooks/, one file each.

    python -m docs.generators.record_notebooks                  # all: about five minutes
    python -m docs.generators.record_notebooks 05_radix_cache   # some
    python -m docs.generators.record_notebooks --gpu            # GPU cells not yet recorded, on a GPU
    python -m docs.generators.record_notebooks --gpu launches   # some GPU cells, by name

A file has the outputs of each code cell, texts and pictures as SVG, and a digest of its source. Times depend
on the computer. GPU cells need no Jupyter and have a file of their own, docs/samples/gpu-cells.json.

A GPU cell calls `on_gpu("its name")`, or `on_gpu("its name", 2)` if it needs two GPUs. It imports what it
uses, so it runs without the cells before it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from notebooks import gpu

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
FOLDER = ROOT / "docs" / "samples" / "notebooks"

HEADING = "## On a GPU\n"
"""Of the last section of a notebook, which has all GPU cells."""

PREPARE = """
%config InlineBackend.figure_formats = ["svg"]
import matplotlib
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "diptych"})
"""
"""Run before the cells of a notebook that draws."""

_CALL = re.compile(r'\bon_gpu\("([^"]+)"(?:, (\d+))?\)')
# What a picture does not need: names of groups, digits behind the hundredths, line breaks and more.
_SPARE = (
    r'<\?xml.*?(?=<svg )|<metadata>.*?</metadata>| id="[a-z]+[\da-z]*_\d+"| transform="rotate\(-0 [^)]*\)"'
    r"|(?<=\d\.\d\d)\d+|(?<=>)\s+(?=<)| ?\n"
)


def name_of(source: str) -> str | None:
    """The name of a GPU cell; None for another cell."""
    found = _CALL.search(source)
    return found.group(1) if found else None


def gpu_cells(notebook: Path) -> dict[str, str]:
    """The sources of a notebook's GPU cells by name, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return {name: source for source in sources if (name := name_of(source)) is not None}


def num_gpus_of(source: str) -> int:
    found = _CALL.search(source)
    return int(found.group(2) or 1) if found else 0


def digest(source: str) -> str:
    """It tells whether a cell is still the one whose outputs are recorded."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def record(path: Path) -> list[dict[str, Any]]:
    """The digest and the outputs of each code cell, run from top to bottom in a fresh kernel. GPU cells are
    left out."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if name_of(cell.source) is None]
    if "drawing" in path.read_text(encoding="utf-8"):
        notebook.cells.insert(0, nbformat.v4.new_code_cell(PREPARE))
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source != PREPARE]
    return [{"digest": digest(cell.source), "outputs": outputs_of(cell)} for cell in cells]


def outputs_of(cell: Any) -> list[dict[str, str]]:
    """Texts and pictures in order; neighboring texts become one. What goes to stderr is left out."""
    found: list[dict[str, str]] = []
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            found.append({"svg": re.sub(_SPARE, "", data["image/svg+xml"], flags=re.DOTALL)})
            continue
        text = output.text if output.get("name") == "stdout" else data.get("text/plain", "")
        if text and found and "text" in found[-1]:
            found[-1]["text"] += text
        elif text:
            found.append({"text": text})
    return found


def record_gpu_cells(names: list[str]) -> None:
    """Runs these GPU cells and writes their record; without names, those that are not recorded and for which
    there are enough GPUs. A cell that fails keeps its record; its traceback is printed."""
    import torch

    sources = {
        name: source for path in sorted(NOTEBOOKS.glob("*.ipynb")) for name, source in gpu_cells(path).items()
    }
    cells = {name: cell for name, cell in gpu.record().items() if name in sources}
    missing = [
        name
        for name, source in sources.items()
        if cells.get(name, {}).get("digest") != digest(source)
        and num_gpus_of(source) <= torch.cuda.device_count()
    ]
    failed = []
    for name in names or missing:
        start, source = time.perf_counter(), sources[name]
        count, card = num_gpus_of(source), torch.cuda.get_device_name()
        facts = {"gpu": card if count == 1 else f"{count} x {card}", "torch": torch.__version__}
        try:
            text, date = run(source), str(datetime.date.today())
            cells[name] = {"digest": digest(source), "text": text, **facts, "date": date}
        except subprocess.CalledProcessError:
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    in_order = {name: cells[name] for name in sources if name in cells}
    gpu.RECORD.write_text(json.dumps(in_order, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(source: str) -> str:
    """What a cell prints in a process of its own. Raises `CalledProcessError` if it fails."""
    command = [sys.executable, "-c", source]
    return subprocess.run(command, cwd=NOTEBOOKS, stdout=subprocess.PIPE, text=True, check=True).stdout


def main(names: list[str]) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if names[:1] == ["--gpu"]:
        record_gpu_cells(names[1:])
        return
    paths = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    wrong = sorted(set(names) - set(paths))
    if wrong:
        raise SystemExit(f"no notebook {', '.join(wrong)}; there are {', '.join(paths)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names or paths:
        start = time.perf_counter()
        text = json.dumps(record(paths[name]), indent=0, ensure_ascii=False).replace(f"{ROOT}/", "")
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
