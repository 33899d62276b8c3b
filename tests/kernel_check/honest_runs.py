"""Checks right functions with many seeds: how often is there a false alarm?

python -m tests.kernel_check.honest_runs --seeds 1000 [--like rms_norm] [--json FILE] goes on where FILE ends.
Several processes, each with operations of its own, may write one FILE.
"""

from __future__ import annotations

import argparse
import fcntl
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from diptych.shared import registry
from diptych.shared.tools.conformance.kernels.conventions import LIKES, convention_of
from diptych.shared.tools.conformance.kernels.problem import Problem
from diptych.shared.tools.conformance.kernels.run import check_kernel
from tests.kernel_check.cheat_runs import cases_of
from tests.kernel_check.cheats import HONEST, planted
from tests.kernel_check.right import RIGHT


def reference_norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    """The layer of the reference panel."""
    norm = registry.load("layers", "reference").RMSNorm(x.shape[-1], eps=eps)
    norm.weight.data = weight
    return norm(x)


FILE = Path(__file__).with_name("honest_runs.json")
CHUNK = 20

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
    "silu_and_mul": {"plain": RIGHT["silu_and_mul", "torch"]},
    "rope": {"plain": RIGHT["rope", "torch"]},
    "add_rms_norm": {"plain": RIGHT["add_rms_norm", "torch"]},
    "moe": {"plain": RIGHT["moe", "torch"]},
    "w8a8": {"plain": RIGHT["w8a8", "torch"]},
    "mla.decode": {"plain": RIGHT["mla.decode", "torch"]},
    "verify": {"plain": RIGHT["verify", "torch"]},
}


def run_seeds(like: str, seeds: Iterable[int]) -> list[str]:
    """The alarms: name of the function, seed, case and failure."""
    alarms, cases, convention = [], cases_of(like, 0), convention_of(like, "torch")
    for seed in seeds:
        operation = replace(LIKES[like], make=made_once(LIKES[like].make))
        for name, function in FUNCTIONS[like].items():
            torch.manual_seed(seed)
            report = check_kernel(function, name, operation, convention, cases, seed=seed)
            alarms += [f"{name}, seed {seed}, {each.case}: {each.failure}" for each in report.failing]
    return alarms


def made_once(make: Callable[..., Problem]) -> Callable[..., Problem]:
    """`make` with its problems kept: functions of one seed share inputs and expected results."""
    made: dict[tuple[str, bool, int], Problem] = {}

    def kept(case: Any, takes_scale: bool, seed: int = 0) -> Problem:
        key = case.name, takes_scale, seed
        if key not in made:
            made[key] = make(case, takes_scale, seed)
        return made[key]

    return kept


def rows_of(text: str) -> dict[str, dict[str, Any]]:
    return {
        like: {"like": like, "functions": list(FUNCTIONS[like]), "seeds": 0, "checks": 0, "alarms": []}
        for like in FUNCTIONS
    } | {each["like"]: each for each in json.loads(text or "[]")}


def write_row(path: Path, row: dict[str, Any]) -> None:
    """The rows of other processes stay as they are in the file."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = rows_of(file.read()) | {row["like"]: row}
        lines = ",\n".join(json.dumps(each) for each in rows.values())
        file.truncate(0)
        file.write(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--like", action="append")
    parser.add_argument("--json", type=Path, default=FILE, help="Written after every chunk of seeds.")
    arguments = parser.parse_args()
    rows = rows_of(arguments.json.read_text(encoding="utf-8") if arguments.json.is_file() else "")
    chosen = arguments.like or list(FUNCTIONS)
    while (least := min(rows[like]["seeds"] for like in chosen)) < arguments.seeds:
        end = min(least + CHUNK, arguments.seeds)
        for like in chosen:
            row = rows[like]
            seeds = range(row["seeds"], max(row["seeds"], end))
            if not seeds:
                continue
            row["alarms"] += run_seeds(like, seeds)
            row["seeds"] = seeds.stop
            row["checks"] += len(seeds) * len(FUNCTIONS[like]) * len(cases_of(like, 0))
            write_row(arguments.json, row)
        print(f"{end} seeds, {sum(len(rows[like]['alarms']) for like in chosen)} alarms", flush=True)


if __name__ == "__main__":
    main()
