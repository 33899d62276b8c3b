"""Checks functions with planted patterns, and records what is found in `cheats.json`.

python -m tests.kernel_check.cheat_runs records the table; the page of the checker shows it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from diptych.shared.tools.bench.bare_kernel import time_passes
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.conventions import LIKES, convention_of
from diptych.shared.tools.conformance.kernels.kernel_report import Report
from diptych.shared.tools.conformance.kernels.problem import Like
from diptych.shared.tools.conformance.kernels.run import check_kernel
from tests.kernel_check.cheats import HONEST, IN_CHILD, IN_TIMING, PATTERNS, REPORTED, planted
from tests.planted import Bugs

FILE = Path(__file__).with_name("cheats.json")
CHEATS = Bugs("cheat")
"""The finder is the name in the report: the first one."""
for _pattern, _row in json.loads(FILE.read_text(encoding="utf-8")).items():
    for _like, _name in _row["found"].items():
        CHEATS.add(f"{_pattern} {_like}", (int(_pattern), _like), _row["what"], where=_like, finder=_name)
LARGE = 300
"""Tokens of the vocabulary that only a pattern of low precision needs."""


def cases_of(like: str, pattern: int) -> tuple[Any, ...]:
    """A choice of cases that is quick: all sizes that a pattern may depend on."""
    cases = LIKES[like].cases
    if like == "attention.decode":
        return tuple(each for each in cases if max(each.seq_lens) < 120 and each.page_size == 16)
    if like == "sampler":
        return tuple(each for each in cases if (pattern == 7) == (each.vocab_size == LARGE))
    return cases


def run_here(pattern: int, like: str, seed: int = 0) -> Report:
    """Checks a function in this process: no pattern of these attacks its checker with success."""
    convention = convention_of(like, "torch")
    torch.manual_seed(seed)
    return check_kernel(
        planted(pattern, like), "f", LIKES[like], convention, cases_of(like, pattern), seed=seed
    )


def run_in_child(pattern: int, like: str) -> str:
    """What a process of its own shows: the first name, the failure of a timed call, or the operators."""
    target = f"tests.kernel_check.cheats:c{pattern}_{like.replace('.', '_')}"
    operation: Like = LIKES[like]
    convention = convention_of(like, "torch")
    with ChildFunction(target) as function:
        if pattern in IN_TIMING:
            problem = operation.make(operation.timed("cpu")[0], convention.takes_scale, 0)
            return str(time_passes(function, operation, convention, problem, random.Random(0)).failure)
        report = check_kernel(function, target, operation, convention, cases_of(like, pattern)[:6])
        if pattern in REPORTED:
            problem = operation.make(operation.cases[0], convention.takes_scale, 0)
            names = ", ".join(function.operators(convention.build(problem)))
            return f"reported: {names}" if not report.status else str(report.names)
        return report.names[0]


def found(pattern: int, like: str) -> str:
    if pattern in (*IN_TIMING, *REPORTED, *IN_CHILD):
        return run_in_child(pattern, like)
    names = run_here(pattern, like).names
    return names[0] if names else "NOT NAMED"


def main() -> None:
    table = json.loads(FILE.read_text(encoding="utf-8"))
    for pattern in PATTERNS:
        table[str(pattern)]["found"] = {like: found(pattern, like) for like in HONEST}
        print(pattern, table[str(pattern)]["found"], flush=True)
    lines = (f"{json.dumps(key)}: {json.dumps(row, ensure_ascii=False)}" for key, row in table.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
