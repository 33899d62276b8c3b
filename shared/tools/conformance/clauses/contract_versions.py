"""Versions of the contracts, and the recorded interface and clauses of each version.

A version is major.minor. A new minor version adds or changes clauses; every implementation that fulfilled the
previous version still fulfils it. A new major version requires more: a method, a parameter, another result.
`contract_versions.json` records for each component its versions, the interface, and a digest of each clause
with the version in which it last changed. `python -m tests.conformance.record_contracts` writes it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("contract_versions.json")
FIRST = "The first recorded version."
Version = tuple[int, int]


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """component -> "changes" (version -> what it changed, oldest first), "interface" (member -> parameters)
    and "clauses" (name -> [version, digest])."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def parse_version(text: str) -> Version:
    """ "1.2" -> (1, 2). Raises `ValueError` on anything else."""
    major, _, minor = text.partition(".")
    if not (text.isascii() and major.isdigit() and minor.isdigit()):
        raise ValueError(f"a version of a contract is major.minor, as 1.0, got {text!r}")
    return int(major), int(minor)


def versions_of(component: str) -> list[str]:
    """The versions of a component, oldest first; the last is the current one. An unknown component raises
    `ValueError`."""
    if component not in recorded():
        raise ValueError(f"no contract for {component!r}; there are contracts for {', '.join(recorded())}")
    return list(recorded()[component]["changes"])


def older_than_current(component: str, written_for: str) -> str | None:
    """The changes since the version that an implementation was written for; None: no change, or an empty
    `written_for`. A version that does not exist raises `ValueError`."""
    versions = versions_of(component)
    if not written_for:
        return None
    version, current = parse_version(written_for), parse_version(versions[-1])
    if version > current:
        raise ValueError(
            f"contract {written_for} of {component} is newer than this Diptych, which has {versions[-1]}: "
            f"upgrade Diptych"
        )
    if version not in map(parse_version, versions):
        raise ValueError(f"no contract {written_for} of {component}; the versions are {', '.join(versions)}")
    if version == current:
        return None
    record = recorded()[component]
    changed = [name for name, (since, _) in record["clauses"].items() if parse_version(since) > version]
    kind = "major: an implementation may need a change" if version[0] < current[0] else "minor"
    lines = [f"{component} was written for contract {written_for}, the contract is {versions[-1]} ({kind})"]
    lines += [f"{v}: {text}" for v, text in record["changes"].items() if parse_version(v) > version]
    lines += [f"clauses new or changed since {written_for}: {', '.join(changed)}"] if changed else []
    return "; ".join(lines)


def surface_of(component: str) -> dict[str, dict[str, str]]:
    """The interface and the clauses of a component as they are now. The interface: methods with their
    parameters, and the fields of the types that are defined beside it."""
    from diptych.shared.engine.build.component_check import interface_of
    from diptych.shared.tools.conformance.clauses.suite import clauses_of

    interface = interface_of(component)
    classes = interface if isinstance(interface, tuple) else (interface,)
    members = {f"{cls.__name__}.{name}": text for cls in classes for name, text in _members(cls).items()}
    for module in {cls.__module__: None for cls in classes}:
        members |= _types(module)
    return {"interface": members, "clauses": {each.name: _digest(each) for each in clauses_of(component)}}


def recorded_surface(component: str) -> dict[str, dict[str, str]]:
    """The recorded interface and clauses of a component."""
    record = recorded().get(component, {"interface": {}, "clauses": {}})
    clauses = {name: digest for name, (_, digest) in record["clauses"].items()}
    return {"interface": record["interface"], "clauses": clauses}


def reasons_for_major(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """The interface changes that can make a correct implementation incomplete."""
    reasons = [f"{name} is new and abstract" for name in new if name not in old and _is_abstract(new[name])]
    for name, text in old.items():
        if name not in new:
            reasons += [] if _is_abstract(text) else [f"{name}, which implementations inherit, is gone"]
        elif _parameters(text) != _parameters(new[name]) and not _is_extended_type(name, text, new[name]):
            reasons.append(f"{name} takes {_parameters(new[name])}, not {_parameters(text)}")
        elif _is_abstract(new[name]) and not _is_abstract(text):
            reasons.append(f"{name} has become abstract")
    return reasons


def _members(cls: type) -> dict[str, str]:
    """Public methods and the constructor with their parameters, in the order of names."""
    found = {}
    for name, value in inspect.getmembers(cls):
        function = value.fget if isinstance(value, property) else value
        is_of_diptych = str(getattr(function, "__module__", "")).startswith("diptych.")
        if inspect.isroutine(function) and is_of_diptych and (name == "__init__" or name[0] != "_"):
            text = _bare(inspect.signature(function))
            is_abstract = name in getattr(cls, "__abstractmethods__", ())
            found[name] = f"abstract {text}" if is_abstract else text
    return found


def _types(module: str) -> dict[str, str]:
    """Dataclasses and named tuples that a module defines, with their fields."""
    own = {name: cls for name, cls in vars(sys.modules[module]).items() if inspect.isclass(cls)}
    return {
        name: _bare(inspect.signature(cls))
        for name, cls in own.items()
        if cls.__module__ == module and (is_dataclass(cls) or hasattr(cls, "_fields"))
    }


def _bare(signature: inspect.Signature) -> str:
    """Remove the types of a signature."""
    names = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=names, return_annotation=inspect.Signature.empty))


def _is_abstract(text: str) -> bool:
    return text.startswith("abstract ")


def _is_extended_type(name: str, old: str, new: str) -> bool:
    """Whether a type has more fields at its end, each with a default. A new parameter of a method is
    different: its callers may use it."""
    added = new[len(old) - 1 : -1].split(", ")
    return "." not in name and new.startswith(old[:-1]) and all("=" in each for each in added if each)


def _parameters(text: str) -> str:
    return text.removeprefix("abstract ")


def _digest(clause: Any) -> str:
    """Digest of a clause's sentence, kind and case names."""
    text = "\n".join([clause.kind, clause.statement, *(str(case.name) for case in clause.cases)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
