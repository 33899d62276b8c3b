"""Where a name in quoted code is defined: in its file, an imported one, or one class of shared/."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
CONTRACTS = ("shared/interfaces/", "shared/types/")  # where one of several classes with a member is meant
FOLDERS = (*CONTRACTS, "shared/scheduling/", "shared/config/", "shared/flags/")
_OTHERS = (list, dict, set, str, int, slice, torch, torch.Tensor, torch.nn.functional)
NOT_OURS = {name for each in _OTHERS for name in dir(each)}


@cache
def names_of(path: str) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    """(names of the module, members of its classes, name -> module that it is imported from)."""
    top, members, imports = dict[str, int](), dict[str, int](), dict[str, str]()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for body in (tree.body, *(each.body for each in tree.body if isinstance(each, ast.ClassDef))):
        for node in body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for name in (getattr(node, "name", ""), *(getattr(each, "id", "") for each in targets)):
                (top if body is tree.body else members).setdefault(name, node.lineno)
    for part in ast.walk(tree):
        match part:
            case ast.ImportFrom(module=str(module), names=names):
                imports.update({each.name: module for each in names})
            case ast.Attribute(value=ast.Name("self"), ctx=ast.Store()):
                members.setdefault(part.attr, part.lineno)
    return top, members, imports


@cache
def _members_of_shared() -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {}
    for path in (file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "shared").rglob("*.py"))):
        for name, line in names_of(path)[1].items() if path.startswith(FOLDERS) else ():
            found.setdefault(name, []).append((path, line))
    return found


def definition_of(path: str, name: str, is_member: bool) -> tuple[str, int] | None:
    """Path and line, for a name in the code of a file; None if it is not of the project, or not clear."""
    top, members, imports = names_of(path)
    if name in (members if is_member else top) and not (is_member and name in NOT_OURS):
        return path, (members if is_member else top)[name]
    if is_member:
        all_places = [] if name in NOT_OURS else _members_of_shared().get(name, [])
        places = [each for each in all_places if each[0].startswith(CONTRACTS)] or all_places
        return places[0] if len(places) == 1 else None
    module = imports.get(name, "").removeprefix("diptych.").replace(".", "/")
    files = [each for each in (f"{module}.py", f"{module}/__init__.py") if (ROOT / each).is_file()]
    return definition_of(files[0], name, False) if files else None
