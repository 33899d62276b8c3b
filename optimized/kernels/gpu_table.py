"""Measured choices of kernels: gpu_tables/<GPU>.json, one file per kind of GPU, written by `diptych tune`.

    {"format": 1, "gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "triton": "3.6.0",
     "experts": {"128 experts, top 8, 2048-768": {"64": [[...], [...]]}},
     "linear": {"6144 x 4096": {"1": "cta_gemv", "64": "tiled_gemm"}},
     "quantized": {"6144 x 4096 int4 ...": {"1": ["gemv", 4, 4, 1, 1], "64": ["gemm", 64, 64, 64, 6, 4],
                                             "128": ["cublas"]}}}

It stores measurements and decides nothing. `linear/linear_choice.py`, `linear/quantized_choice.py` and
`moe/moe_tiles.py` decide, each for its kernels: by this table, or by a rule for what was not measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

FORMAT = 1
FOLDER = Path(__file__).parent / "gpu_tables"

Measured = dict[str, dict[str, Any]]
"""Shape name -> number of tokens -> choice: lists of numbers, or the name of a kernel."""


@dataclass(frozen=True)
class GpuTable:
    gpu: str
    torch: str = ""  # versions at the last measurement
    triton: str = ""
    experts: Measured = field(default_factory=dict)
    linear: Measured = field(default_factory=dict)
    quantized: Measured = field(default_factory=dict)


def path_of(gpu: str) -> Path:
    return FOLDER / f"{gpu.replace(' ', '_')}.json"


@cache
def read(gpu: str) -> GpuTable:
    """The table of a GPU; an empty one if there is none. Raises `ValueError` for a file of another format."""
    path = path_of(gpu)
    return parse(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else GpuTable(gpu)


def parse(text: str, name: str = "table") -> GpuTable:
    data = json.loads(text)
    found = data.pop("format", None)
    if found != FORMAT:
        raise ValueError(
            f"{name} has format {found}, and this version of Diptych reads format {FORMAT}: "
            "delete the file, or measure again with `diptych tune`"
        )
    known = [field.name for field in fields(GpuTable)]
    if "gpu" not in data or not set(data) <= set(known):
        raise ValueError(f"{name} must have a gpu, and may have {known}; it has {list(data)}")
    return GpuTable(**data)


def dumps(table: GpuTable) -> str:
    """JSON with one line per choice."""
    data = {"format": FORMAT, **{key: value for key, value in vars(table).items() if value != {}}}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_value(data[key])}" for key in data) + "\n}\n"


def _value(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    shapes = [f"{json.dumps(name)}: {{\n{_rows(rows)}\n}}" for name, rows in sorted(value.items()) if rows]
    return "{\n" + ",\n".join(shapes) + "\n}" if shapes else "{}"


def _rows(rows: dict[str, Any]) -> str:
    ordered = sorted(rows.items(), key=lambda row: int(row[0]))
    return ",\n".join(f"{json.dumps(size)}: {json.dumps(choice)}" for size, choice in ordered)


def write(table: GpuTable) -> Path:
    path = path_of(table.gpu)
    path.parent.mkdir(exist_ok=True)
    path.write_text(dumps(table), encoding="utf-8")
    read.cache_clear()
    return path
