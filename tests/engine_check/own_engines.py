"""The gates of `diptych check engine` for this project's kernels and number formats; the table of
docs/conformance.md shows what it records.

    python -m tests.engine_check.own_engines cpu tests/engine_check/gates_cpu.json
    python -m tests.engine_check.own_engines cuda tests/engine_check/gates_gpu.json --jobs 4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from diptych.shared.tools.conformance.whole_engine.engine_gate import GATES

NATIVE = "reference,dtype=bfloat16"


class Arm(NamedTuple):
    """An engine against the native one. `margin`: of a number format with fewer bits than the native one, the
    share of B's error by which it may be worse."""

    engine: str
    against: str = NATIVE
    model: str = "tiny-dense"
    margin: float = 0.25


FORMATS = {"int8": 16.0, "fp8": 64.0, "int4": 256.0, "nvfp4": 256.0}
"""Chosen above the measured excess: of tiny-dense 5, 7, 72 and 39 times the native KL divergence."""
ARMS = {
    "cpu": (
        Arm("reference,dtype=bfloat16,page_size=16,chunked_prefill_size=16"),
        Arm("reference,dtype=bfloat16", model="tiny-moe"),
        *(Arm(f"{NATIVE},quantization={name}", margin=margin) for name, margin in FORMATS.items()),
    ),
    "cuda": (
        Arm("optimized,dtype=float32", "reference,dtype=float32"),
        *(
            Arm("optimized,dtype=bfloat16", model=model)
            for model in ("tiny-dense", "tiny-moe", "tiny-hybrid")
        ),
        *(
            Arm(f"optimized,attention={name},dtype=bfloat16")
            for name in ("triton", "flashinfer", "fa3", "flex_attention", "reference")
        ),
        Arm("optimized,dtype=bfloat16,deterministic=true"),
        *(
            Arm(f"optimized,dtype=bfloat16,quantization={name}", f"{NATIVE},quantization={name}")
            for name in FORMATS
        ),
        Arm("optimized,dtype=bfloat16,kv_cache_dtype=fp8_e4m3", f"{NATIVE},kv_cache_dtype=fp8_e4m3"),
        *(
            Arm(f"optimized,dtype=bfloat16,quantization={name}", margin=margin)
            for name, margin in FORMATS.items()
        ),
    ),
}
"""What a computer with this device runs. Kernels of a format are compared with the reference in that format,
and the format with bfloat16."""


def recorded(arm: Arm, device: str, seconds: float, num_prompts: int) -> dict[str, Any]:
    """A row of the table: verdicts and numbers of the gates, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gates.json"
        command = [
            sys.executable, "-m", "diptych", "check", "engine", arm.engine, "--against", arm.against,
            "--model", arm.model, "--device", device, "--margin", f"{arm.margin:g}", "--json", str(file),
            "--num-prompts", str(num_prompts), "--within", f"{seconds:g}",
        ]  # fmt: skip
        row: dict[str, Any] = {**arm._asdict(), "prompts": num_prompts}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
        except subprocess.TimeoutExpired:
            return {**row, "why": f"no end after {seconds + 60:g} s"}
        if not file.exists():
            return {**row, "why": (done.stdout + done.stderr).strip().splitlines()[-1][:300]}
        gates = {gate["name"]: gate for gate in json.loads(file.read_text())["gates"]}
    for short, name in zip(("kl", "nll", "batch", "prefix"), GATES):
        if gate := gates.get(name):
            numbers = {key: float(f"{gate[key]:.3g}") for key in ("arm", "native", "upper", "allowed")}
            row[short] = {"verdict": gate["verdict"], **numbers}
    return row


def as_text(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=list(ARMS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="for one engine")
    parser.add_argument("--num-prompts", type=int, default=64)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        asks = [
            pool.submit(recorded, arm, options.device, options.seconds, options.num_prompts)
            for arm in ARMS[options.device]
        ]
        for ask in asks:
            rows.append(row := ask.result())
            verdicts = [row.get(short, {}).get("verdict", "-") for short in ("kl", "nll", "batch", "prefix")]
            print(row["model"], row["engine"], *verdicts, row.get("why", ""), flush=True)
            options.file.write_text("[\n" + ",\n".join(map(as_text, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
