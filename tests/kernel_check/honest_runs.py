"""Checks right functions with many seeds: how often is there a false alarm?

python -m tests.kernel_check.honest_runs --seeds 1000 [--processes N] [--json FILE] goes on where FILE ends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from diptych.shared import registry
from diptych.shared.tools.conformance.kernels.conventions import LIKES
from tests.kernel_check.cheats import HONEST, planted
from tests.kernel_check.library_runs import run_functions
from tests.kernel_check.many_seeds import Alarms, Record, Task
from tests.kernel_check.many_seeds import run_seeds as run_tasks
from tests.kernel_check.right import RIGHT


def reference_norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    """The layer of the reference panel."""
    norm = registry.load("layers", "reference").RMSNorm(x.shape[-1], eps=eps)
    norm.weight.data = weight
    return norm(x)


FILE = Path(__file__).with_name("honest_runs.json")
FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "rms_norm": {
        "plain": HONEST["rms_norm"],
        "torch": lambda x, shape, weight, eps: F.rms_norm(x, (x.shape[-1],), weight, eps),
        "reference": reference_norm,
    },
    # Contiguous: see "A GEMM of oneDNN" in docs/server-bugs.md.
    "gemm": {"plain": HONEST["gemm"], "torch": lambda a, b: F.linear(a.contiguous(), b)},
    "attention.decode": {"plain": HONEST["attention.decode"], "torch": planted(18, "attention.decode")},
    "sampler": {"plain": HONEST["sampler"]},
    "attention.extend": {"plain": RIGHT["attention.extend", "torch"]},
    "silu_and_mul": {"plain": RIGHT["silu_and_mul", "torch"]},
    "rope": {"plain": RIGHT["rope", "torch"]},
    "add_rms_norm": {"plain": RIGHT["add_rms_norm", "torch"]},
    "moe": {"plain": RIGHT["moe", "torch"]},
    "w8a8": {"plain": RIGHT["w8a8", "torch"]},
    "mla.decode": {"plain": RIGHT["mla.decode", "torch"]},
    "verify": {"plain": RIGHT["verify", "torch"]},
}


def run_seed(like: str, seed: int, names: Sequence[str] = ()) -> dict[str, Alarms]:
    """The functions share inputs and expected results. An alarm: function, seed, case and failure."""
    torch.set_num_threads(1)  # other processes have the other cores
    functions = {name: ("torch", function) for name, function in FUNCTIONS[like].items()}
    found = run_functions(LIKES[like], functions, seed)
    checks, refused = (sum(each[i] for each in found.values()) for i in range(2))
    return {like: (checks, refused, [f"{name}, {each}" for name in found for each in found[name][2]])}


def run_seeds(like: str, seeds: Iterable[int]) -> list[str]:
    return [alarm for seed in seeds for alarm in run_seed(like, seed)[like][2]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--like", action="append", choices=FUNCTIONS)
    parser.add_argument("--json", type=Path, default=FILE, help="Written while seeds are run.")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="No seed begins later.")
    arguments = parser.parse_args()
    tasks = {like: Task([like], partial(run_seed, like)) for like in arguments.like or FUNCTIONS}
    ends_at = time.monotonic() + arguments.seconds
    rows = run_tasks(
        tasks, arguments.seeds, arguments.json, arguments.processes, lambda: time.monotonic() <= ends_at
    )
    record = Record(arguments.json)
    for like, row in rows.items():
        record.rows[like] = {**row, "functions": list(FUNCTIONS[like])}
    record.write()
    for like, row in rows.items():
        counts = f"{row['seeds']} seeds, {row['checks']} cases, {row['refused']} refused"
        print(f"{like}: {counts}, {len(row['alarms'])} alarms", *row["alarms"], sep="\n  ")


if __name__ == "__main__":
    main()
