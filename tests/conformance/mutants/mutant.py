"""Bugs planted in components, which a clause must find: subclasses, or changed words of the source."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.changed_modules import Change
from tests.planted import Bug, Bugs, Words

KILLERS_FILE = Path(__file__).parents[1] / "killers.json"
REMEDY = "run python -m tests.conformance.find_killers"
PLANTED = Bugs("clause", finder=REMEDY)
"""By component and name; the finder is the clause of killers.json, which says its case."""


@cache
def killers() -> dict[str, list[str]]:
    """Name of a bug in PLANTED -> [clause, case]."""
    table = json.loads(KILLERS_FILE.read_text()) if KILLERS_FILE.is_file() else {}
    rows = ((component, *row) for component, clauses in table.items() for row in clauses.items())
    return {f"{component}-{bug}": [c, case] for component, c, bugs in rows for bug, case in bugs.items()}


def write_killers(known: dict[str, list[str]]) -> None:
    """A clause on a line."""
    table: dict[str, dict[str, dict[str, str]]] = {}
    for name, (clause, case) in sorted(known.items()):
        component, _, bug = name.partition("-")
        table.setdefault(component, {}).setdefault(clause, {})[bug] = case
    text = json.dumps(table, separators=(",", ":"))
    KILLERS_FILE.write_text(text.replace('},"', '},\n"') + "\n")


def _add(component: str, name: str, what: str, impl: Any) -> Bug:
    assert what, f"{name}: say what goes wrong"
    finder, case = killers().get(f"{component}-{name}", ("", ""))
    return PLANTED.add(f"{component}-{name}", impl, what, where=component, finder=finder, says=case)


def plant(component: str, impl: Any, wrong: type, prefix: str = "") -> Bug:
    """`impl`, which contains `wrong`: this class names the bug, and its docstring says what goes wrong."""
    return _add(component, prefix + wrong.__name__, wrong.__doc__ or "", impl)


def mutant_of(component: str) -> Callable[[Any], Bug]:
    """Plants a subclass."""
    return lambda impl: plant(component, impl, impl)


def bugs_in(component: str, entry: str, *always: Change, folder: str = "") -> Callable[..., Bug]:
    """Plants changed words in what `entry` (module:class, or a module) is made of. A change: (module, before,
    after); the module is one of `folder`, or has its whole name. `always`: changes that each bug has."""

    def plant(name: str, what: str, *changes: tuple[str, str, str]) -> Bug:
        own = [
            Change(
                file if file.startswith(("optimized.", "reference.", "shared.")) else folder + file,
                before,
                after,
            )
            for file, before, after in changes
        ]
        return _add(component, name, what, Words(entry, (*always, *own)))

    return plant


def module_with(module: ModuleType, **replaced: Any) -> SimpleNamespace:
    """A component that is a module, with some of its classes replaced."""
    return SimpleNamespace(**{**vars(module), **replaced})
