"""Writes shared/tools/course/labs.json from lab_bugs.py:  python -m tests.labs.seal

It runs the contract of each lab's component, to find all clauses that catch the bug: each is a right answer.
"""

from __future__ import annotations

import json
from typing import Any

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.course import labs
from tests.labs.lab_bugs import BUGS, GITHUB, LabBug


def catching(bug: LabBug, number: int) -> list[str]:
    """The clauses that catch the bug; the best one first."""
    target = registry.IMPLEMENTATIONS[bug.component]["reference"]
    module, _, attribute = target.partition(":")
    copy = labs.changed_module(module, f"seal{number}", bug.changes)
    impl = getattr(copy, attribute) if attribute else copy
    found = []
    for clause in suite.clauses_of(bug.component):
        for verdict in suite.check_implementation(
            [clause], impl, registry.load(bug.component, "reference"), shrink_failures=False
        ):
            if not verdict.holds:
                found.append(clause.name)
                break
    print(f"{number}: {bug.component}: {', '.join(found)}")
    if bug.best not in found:
        raise SystemExit(f"lab {number}: {bug.best} does not catch the bug")
    return [bug.best, *(name for name in found if name != bug.best)]


def fields_of(bug: LabBug, clauses: list[str]) -> dict[str, Any]:
    """What is sealed."""
    return {
        "component": bug.component,
        "changes": bug.changes,
        "clauses": clauses,
        "explanation": " ".join(bug.explanation.split()),
        "links": [GITHUB + link for link in bug.links],
    }


def main() -> None:
    entries = [
        {
            "title": bug.title,
            "story": " ".join(bug.story.split()),
            "scene": bug.scene,
            "sealed": labs.sealed(fields_of(bug, catching(bug, number))),
        }
        for number, bug in enumerate(BUGS, start=1)
    ]
    labs.FILE.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
