"""Record a new version of every contract whose interface or clauses have changed.

    python -m tests.conformance.record_contracts                       # what has changed
    python -m tests.conformance.record_contracts --minor "what is new"
    python -m tests.conformance.record_contracts --major "what implementations must change"

A minor version is refused for a change of the interface after which an implementation may be incomplete.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from diptych.shared.tools.conformance.clauses.contract_versions import (
    FILE,
    FIRST,
    parse_version,
    reasons_for_major,
    recorded,
    recorded_surface,
    surface_of,
)
from diptych.shared.tools.conformance.clauses.suite import CONTRACTS


def changed() -> dict[str, list[str]]:
    """component -> clauses and members of the interface that are not as recorded."""
    found = {}
    for component in CONTRACTS:
        old, new = recorded_surface(component), surface_of(component)
        if old != new:
            found[component] = [
                name
                for part in ("interface", "clauses")
                for name in sorted({*old[part], *new[part]})
                if old[part].get(name) != new[part].get(name)
            ]
    return found


def next_record(component: str, is_major: bool, text: str) -> dict[str, Any]:
    """The record of the next version; `ValueError` if it must be a major one. A new component gets 1.0."""
    old, new = recorded_surface(component), surface_of(component)
    record = recorded().get(component)
    if record is None:
        version, changes = "1.0", {"1.0": FIRST}
    else:
        reasons = reasons_for_major(old["interface"], new["interface"])
        if reasons and not is_major:
            raise ValueError(f"{component} needs a major version: {'; '.join(reasons)}")
        major, minor = parse_version(list(record["changes"])[-1])
        version = f"{major + 1}.0" if is_major else f"{major}.{minor + 1}"
        changes = {**record["changes"], version: text}
    clauses = {
        name: record["clauses"][name] if record and old["clauses"].get(name) == digest else [version, digest]
        for name, digest in new["clauses"].items()
    }
    return {"changes": changes, "interface": new["interface"], "clauses": clauses}


_compact = json.JSONEncoder(separators=(",", ":")).encode


def write(records: dict[str, dict[str, Any]]) -> None:
    """A component, a part and a clause on a line each, so that a diff shows what has changed."""
    blocks = []
    for component, record in records.items():
        parts = [
            f"{json.dumps(part)}:{{\n"
            + ",\n".join(f"{json.dumps(name)}:{_compact(value)}" for name, value in content.items())
            + "}"
            for part, content in record.items()
        ]
        blocks.append(f"{json.dumps(component)}:{{\n" + ",\n".join(parts) + "}")
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--minor", metavar="TEXT")
    kind.add_argument("--major", metavar="TEXT")
    options = parser.parse_args()
    found = changed()
    for component, names in found.items():
        print(f"{component}: {', '.join(names)}")
    text = options.minor or options.major
    new = {name for name in found if name not in recorded()}
    if not text and new != set(found):
        print("record them with --minor TEXT or --major TEXT")
        return
    new_records = {name: next_record(name, bool(options.major), text) for name in found}
    write({name: new_records.get(name) or recorded()[name] for name in CONTRACTS})


if __name__ == "__main__":
    main()
