"""GPU cells of the notebooks: finding them, and running them where there is a GPU.

A GPU cell is a code cell that calls `on_gpu("its name")`, or `on_gpu("its name", 2)` if it needs two GPUs. It
imports what it uses, so it runs without the cells before it, and without Jupyter.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from notebooks.gpu import RECORD
from notebooks.gpu import record as recorded

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
HEADING = "## On a GPU\n"
"""Of the last section of a notebook, which has all GPU cells."""

_CALL = re.compile(r'\bon_gpu\("([^"]+)"(?:, (\d+))?\)')


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


def record(names: list[str]) -> None:
    """Runs these GPU cells and writes RECORD; without names, those that are not recorded and for which there
    are enough GPUs. A cell that fails keeps its record; its traceback is printed."""
    import torch

    sources = {
        name: source for path in sorted(NOTEBOOKS.glob("*.ipynb")) for name, source in gpu_cells(path).items()
    }
    cells = {name: cell for name, cell in recorded().items() if name in sources}
    missing = [
        name
        for name, source in sources.items()
        if cells.get(name, {}).get("source") != source and num_gpus_of(source) <= torch.cuda.device_count()
    ]
    failed = []
    for name in names or missing:
        start, source = time.perf_counter(), sources[name]
        count, gpu = num_gpus_of(source), torch.cuda.get_device_name()
        facts = {"gpu": gpu if count == 1 else f"{count} x {gpu}", "torch": torch.__version__}
        try:
            cells[name] = {"source": source, "text": run(source), **facts, "date": str(datetime.date.today())}
        except subprocess.CalledProcessError:
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    in_order = {name: cells[name] for name in sources if name in cells}
    RECORD.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(source: str) -> str:
    """What a cell prints in a process of its own. Raises `CalledProcessError` if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", source]
    return subprocess.run(
        command, cwd=NOTEBOOKS, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
