"""Results of a check for CI: SARIF, which code scanners show, and the JSON of a badge."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
GREEN, RED, GREY = "brightgreen", "red", "lightgrey"


class Checked(NamedTuple):
    """One check. `problems`: what was found, each in one text; empty: it holds. `path`: the file that a code
    scanner shows."""

    name: str
    sentence: str
    problems: Sequence[str]
    path: str


def diptych_version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:
        return "0"


def sarif(checks: Sequence[Checked], command: str) -> dict[str, Any]:
    """SARIF 2.1.0 with a rule for each check and a result for each problem."""
    rules = [{"id": each.name, "shortDescription": {"text": each.sentence}} for each in checks]
    results = [
        {
            "ruleId": each.name,
            "ruleIndex": index,
            "level": "error",
            "message": {"text": f"{each.sentence} {problem}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": each.path},
                        "region": {"startLine": 1},
                    }
                }
            ],
        }
        for index, each in enumerate(checks)
        for problem in each.problems
    ]
    driver = {"name": command, "version": diptych_version(), "rules": rules}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def badge(checks: Sequence[Checked], label: str) -> dict[str, Any]:
    """JSON for an endpoint badge of shields.io. The label has the version, on which the checks depend."""
    num_failing = sum(bool(each.problems) for each in checks)
    message = f"{num_failing} of {len(checks)} fail" if num_failing else f"{len(checks)} checks hold"
    return {
        "schemaVersion": 1,
        "label": f"{label} {diptych_version()}",
        "message": message if checks else "nothing checked",
        "color": RED if num_failing else GREEN if checks else GREY,
    }
