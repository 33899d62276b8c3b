"""Labs: engines with a planted bug, of which the learner sees the symptom.

`labs.json` has each lab's title and story, and in a sealed form, so that no answer is read by accident, the
bug, the right answers and the explanation. `python -m tests.labs.seal` writes it.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from diptych.shared import registry

FILE = Path(__file__).with_name("labs.json")


@dataclass(frozen=True)
class Lab:
    number: int
    title: str
    story: str
    scene: str  # function of lab_scenes
    component: str
    changes: tuple[tuple[str, str], ...]  # words of the reference's module -> other words
    clauses: tuple[str, ...]  # that catch it; the first says it best
    explanation: str
    links: tuple[str, ...]  # issues and pull requests of public engines

    @property
    def choice(self) -> str:
        """The engine with the bug, for --use and for `diptych check`."""
        return f"lab{self.number:02}"


@cache
def labs() -> tuple[Lab, ...]:
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Lab(number, entry["title"], entry["story"], entry["scene"], **unsealed(entry["sealed"]))
        for number, entry in enumerate(entries, start=1)
    )


def lab_of(number: int) -> Lab:
    """The lab of a number; an unknown one raises `ValueError`."""
    if not 1 <= number <= len(labs()):
        raise ValueError(f"there is no lab {number}; the labs are 1 to {len(labs())}")
    return labs()[number - 1]


def sealed(fields: dict[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(fields).encode(), 9)).decode()


def unsealed(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    fields["changes"] = tuple((before, after) for before, after in fields["changes"])
    fields["clauses"], fields["links"] = tuple(fields["clauses"]), tuple(fields["links"])
    return fields


@cache
def implementation(component: str, number: int) -> Any:
    """A component of a lab's engine: the reference's, or the one with the bug."""
    lab = lab_of(number)
    if component != lab.component:
        return registry.load(component, "reference")
    module_name, _, attribute = registry.IMPLEMENTATIONS[component]["reference"].partition(":")
    module = changed_module(module_name, lab.choice, lab.changes)
    return getattr(module, attribute) if attribute else module


def changed_module(name: str, suffix: str, changes: tuple[tuple[str, str], ...]) -> ModuleType:
    """A copy of a module in whose source words are replaced. Tracebacks show the lines of the original."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for before, after in changes:
        assert source.count(before) == 1, f"{name} does not have {before!r} once"
        source = source.replace(before, after)
    module = ModuleType(f"{name}_{suffix}")
    sys.modules[module.__name__] = module  # dataclasses look their module up by name
    exec(compile(source, spec.origin, "exec"), vars(module))
    return module


Verdict = Literal["right", "component", "wrong"]


def judge(lab: Lab, answer: str) -> Verdict:
    """Judge "radix_cache:whole-pages": right, right in the component alone, or wrong. An answer that names no
    component or no clause raises `ValueError`."""
    from diptych.shared.tools.conformance.clauses.suite import clauses_of

    component, colon, name = answer.partition(":")
    if not colon:
        raise ValueError(f"an answer is component:clause, as radix_cache:whole-pages, got {answer!r}")
    if name not in [clause.name for clause in clauses_of(component)]:
        raise ValueError(f"{component} has no clause {name!r}: `diptych check {component} --list` lists them")
    if component != lab.component:
        return "wrong"
    return "right" if name in lab.clauses else "component"
