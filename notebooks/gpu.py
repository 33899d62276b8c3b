"""GPU cells of the notebooks: they run where a CUDA GPU is, and show a recorded output elsewhere."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "docs" / "samples" / "gpu-cells.json"
"""Written by `python -m docs.generators.record_notebooks --gpu`."""


@cache
def record() -> dict[str, Any]:
    """By the name of a cell: a digest of its source, what it printed, the GPU, torch's version and the date."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def recorded(name: str) -> str:
    """What a cell printed on a GPU, with the GPU's name and the date."""
    cell = record().get(name)
    if cell is None:
        return "This cell needs CUDA GPUs. Nothing is recorded of it."
    return f"One run on {cell['gpu']}, torch {cell['torch']}, {cell['date']}:\n\n{cell['text']}"


def on_gpu(name: str, num_gpus: int = 1) -> bool:
    """True with so many CUDA GPUs. Without them, prints the recorded output of the cell and is False."""
    import torch

    if torch.cuda.device_count() >= num_gpus:
        return True
    print(recorded(name))
    return False


def milliseconds(function: Callable[..., object], *args: object, repeats: int = 20) -> float:
    """The GPU's time of one call with these arguments: the median of `repeats`, after three to warm up."""
    import torch

    for _ in range(3):
        function(*args)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function(*args)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
