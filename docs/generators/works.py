"""What works where: the registry's implementations, and the recorded runs of their tests on GPUs.

docs/generators/record_gpu_tests.py writes the records. What no record has is "not run yet".
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from diptych.shared import registry
from docs.generators.classes import ROOT
from docs.generators.measured import DATA
from docs.generators.tables import table, wrapping

NOT_YET = "not run yet"
PACKAGES = {
    "flashinfer": "flashinfer-python",
    "triton": "triton",
    "msgspec": "msgspec",
    "xgrammar": "xgrammar",
}
"""Modules of packages that not every installation has -> the package."""


@cache
def records() -> tuple[dict[str, Any], ...]:
    """The recorded runs."""
    files = sorted(DATA.glob("gpu-tests-*.json"))
    return tuple(json.loads(path.read_text(encoding="utf-8")) for path in files)


def works_components() -> str:
    """Every implementation of every component: the devices, the packages, and the cases of its contract that
    passed on GPUs."""
    rows: list[list[str]] = []
    heads = [f"Cases on {title(each)}" for each in records()] or ["Cases on GPUs"]
    empty = [""] * len(heads)
    for component, available in registry.IMPLEMENTATIONS.items():
        first = len(rows)
        for choice, target in available.items():
            needs = ", ".join(f"`{package}`" for package in packages_of(target.partition(":")[0]))
            ran = [counts(each["contracts"].get(component, {}).get(choice)) for each in records()]
            rows.append(["", f"`{choice}`", devices(component, choice), needs, *(ran or [NOT_YET])])
        if "optimized" not in available:
            rows.append(["", "`optimized`", "there is none: the panel uses `reference`", "", *empty])
        for name, needed in registry.UNAVAILABLE.items():
            if name.startswith(f"{component}="):
                rows.append(["", f"`{name.partition('=')[2]}`", f"refused: {needed}", "", *empty])
        rows[first][0] = f"[`{component}`](components/{component}.md)"
    return table(["Component", "Implementation", "Devices", "Packages", *heads], rows)


def works_tests() -> str:
    """Every file of tests that need a GPU, with its counts in each recorded run."""
    if not records():
        return "No run is recorded."
    files = sorted({file for each in records() for file in each["files"]})
    rows = [[f"`{file}`", *(counts(_total(each, file)) for each in records())] for file in files]
    return wrapping(table(["Tests", *(title(each) for each in records())], rows))


def gpu_runs(notes: dict[str, str]) -> str:
    """A table of parts: notes of tests, FILE or FILE::FUNCTION, with what they test."""
    rows = []
    for test, part in notes.items():
        file, _, function = test.partition("::")
        source = ROOT / file
        if not source.is_file() or f"def {function}" not in source.read_text(encoding="utf-8"):
            raise ValueError(f"no test {test}")
        ran = [
            f"{counts(found)} on {title(each)}"
            for each in records()
            if (found := _total(each, file, function)) and found[0] + found[1]
        ]
        rows.append([part, f"`{test}`", "; ".join(ran) or NOT_YET])
    return wrapping(table(["Part", "Tests", "Recorded runs on GPUs"], rows))


def gpu_cards() -> str:
    """A sentence: the GPUs with a recorded run."""
    if not records():
        return "No run of the tests on a GPU is recorded yet."
    runs = [
        f"{title(each)} (torch {each['torch']}, commit {each['commit']}, {each['date']})"
        for each in records()
    ]
    return f"The tests have run on {'; '.join(runs)}."


def devices(component: str, choice: str) -> str:
    if registry.needs_cuda(component, choice):
        return "CUDA GPU"
    if choice in registry.NEEDS_TRITON.get(component, ()):
        return "CUDA GPU; CPU in Triton's interpreter"
    return "CPU, GPU"


def packages_of(module: str) -> list[str]:
    """The optional packages that a module of ours imports, in a function too, or that its imports need."""
    found, waiting = set(_imports(module, is_deep=True)), [module]
    for name in waiting:
        imports = _imports(name)
        found.update(imports)
        waiting += [each for each in imports if each.startswith("diptych.") and each not in waiting]
    return sorted({PACKAGES[name.partition(".")[0]] for name in found if name.partition(".")[0] in PACKAGES})


@cache
def _imports(module: str, is_deep: bool = False) -> tuple[str, ...]:
    """The modules, and names in modules, that a module imports; is_deep: in functions too."""
    stem = ROOT / module.replace(".", "/")
    path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    names: dict[str, None] = {}
    for node in ast.walk(tree) if is_deep else tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            place = getattr(node, "module", None)
            names |= dict.fromkeys(f"{place}.{each.name}" if place else each.name for each in node.names)
            names |= {place: None} if place else {}
    return tuple(names)


def title(record: dict[str, Any]) -> str:
    return f"{record['gpus']} × {record['card'].removeprefix('NVIDIA ')}"


def counts(found: Sequence[int] | None) -> str:
    """[passed, failed, not run] in words."""
    if not found or not found[0] + found[1]:
        return NOT_YET
    passed, failed, not_run = found
    more = [f"{failed} failed"] * bool(failed) + [f"{not_run} not run"] * bool(not_run)
    return f"{passed} passed" + "".join(f", {each}" for each in more)


def _total(record: dict[str, Any], file: str, function: str = "") -> list[int]:
    functions = record["files"].get(file, {})
    chosen = [count for name, count in functions.items() if function in ("", name)]
    return [sum(column) for column in zip(*chosen)] or [0, 0, 0]
