"""GPU cells of the notebooks: finding them, and running them where there is a GPU.

A GPU cell is a code cell that calls `on_gpu("its name")`. It imports what it uses, so it runs without the
cells before it, and without Jupyter.
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
from typing import Any

from notebooks.gpu import RECORD

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"

_CALL = re.compile(r'\bon_gpu\("([^"]+)"\)')


def name_of(source: str) -> str | None:
    """The name of a GPU cell; None for another cell."""
    found = _CALL.search(source)
    return found.group(1) if found else None


def gpu_cells(notebook: Path) -> dict[str, str]:
    """The sources of a notebook's GPU cells by name, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return {name: source for source in sources if (name := name_of(source)) is not None}


def record() -> None:
    """Runs all GPU cells and writes RECORD. A cell that fails keeps no record; its traceback is printed."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("GPU cells are recorded where there is a CUDA GPU")
    sys.path.insert(0, str(NOTEBOOKS))
    cells: dict[str, dict[str, str]] = {}
    failed = []
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        for name, source in gpu_cells(notebook).items():
            start = time.perf_counter()
            try:
                cells[name] = {"source": source, "text": run(source)}
            except Exception:
                traceback.print_exc()
                failed.append(name)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{notebook.stem}, {name}: {time.perf_counter() - start:.1f} s", flush=True)
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    text = json.dumps(facts | {"cells": cells}, indent=1, ensure_ascii=False)
    RECORD.write_text(text + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(source: str) -> str:
    """What a cell prints, run in a namespace of its own."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "<GPU cell>", "exec"), {"__name__": "__main__"})
    return output.getvalue()
