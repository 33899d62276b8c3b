"""GPU cells of the notebooks: finding them, and running them where there is a GPU.

A GPU cell is a code cell that calls `on_gpu("its name")`, or `on_gpu("its name", 2)` if it needs two GPUs. It
imports what it uses, so it runs without the cells before it, and without Jupyter.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import json
import re
import sys
import time
import traceback
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

    if not torch.cuda.is_available():
        raise SystemExit("GPU cells are recorded where there is a CUDA GPU")
    sys.path.insert(0, str(NOTEBOOKS))
    sources = {
        name: source for path in sorted(NOTEBOOKS.glob("*.ipynb")) for name, source in gpu_cells(path).items()
    }
    wrong = sorted(set(names) - set(sources))
    if wrong:
        raise SystemExit(f"no GPU cell {', '.join(wrong)}; there are {', '.join(sources)}")
    cells = {name: cell for name, cell in recorded().items() if name in sources}
    missing = [
        name
        for name, source in sources.items()
        if cells.get(name, {}).get("source") != source and num_gpus_of(source) <= torch.cuda.device_count()
    ]
    failed = []
    for name in names or missing:
        start = time.perf_counter()
        try:
            cells[name] = {"source": sources[name], "text": run(sources[name]), **facts(sources[name])}
        except Exception:
            traceback.print_exc()
            failed.append(name)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    in_order = {name: cells[name] for name in sources if name in cells}
    RECORD.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def facts(source: str) -> dict[str, str]:
    """On what a cell runs."""
    import torch

    count = num_gpus_of(source)
    gpu = torch.cuda.get_device_name()
    return {
        "gpu": gpu if count == 1 else f"{count} x {gpu}",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def run(source: str) -> str:
    """What a cell prints, run in a namespace of its own."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "<GPU cell>", "exec"), {"__name__": "__main__"})
    return output.getvalue()
