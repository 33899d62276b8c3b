"""Where the names in quoted code are defined: jedi finds it, or one folder has the only definition."""

from __future__ import annotations

import builtins
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jedi
import torch

ROOT = Path(__file__).parents[2]
LISTED = json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))
"""Names that jedi does not find, and why: their package, or the file of their definition."""
_OTHERS = (builtins, list, dict, set, str, int, slice, torch, torch.Tensor, torch.nn.functional)
NOT_OURS = {name for each in _OTHERS for name in dir(each)}
NOT_OURS.update(" ".join(LISTED["other packages"].values()).split())

Place = tuple[str, int]
UNKNOWN: Place = ("", 0)


@cache
def _names_of(path: str) -> list[Any]:
    script = jedi.Script(path=ROOT / path, project=jedi.Project(ROOT))
    return list(script.get_names(all_scopes=True, references=True))


@cache
def definitions(path: str, lines: range) -> dict[str, Place | None]:
    """Each name in these lines -> path and line of its definition, or UNKNOWN; None: it is in these lines, or
    of another package."""
    names = [each for each in _names_of(path) if each.line in lines]
    found = dict.fromkeys([each.name for each in names if each.is_definition()])
    for each in names:
        if each.name not in found:
            found[each.name] = None if each.name in NOT_OURS else _definition(path, each)
    here = {name for name, place in found.items() if place and place[0] == path and place[1] in lines}
    return found | dict.fromkeys(here)


def _definition(path: str, name: Any) -> Place | None:
    for each in name.goto(follow_imports=True):
        file = Path(each.module_path or "/").resolve()
        return (file.relative_to(ROOT).as_posix(), each.line) if file.is_relative_to(ROOT) else None
    receiver = re.search(r"(\w+)\.$", name.get_line_code()[: name.column])
    of_type = f"shared/types/{receiver[1]}.py" if receiver else ""
    places = LISTED["receivers without a type"].items()
    chosen = next((file for file, names in places if name.name in names.split()), of_type)
    if (ROOT / chosen).is_file():
        for number, line in enumerate((ROOT / chosen).read_text("utf-8").splitlines(), start=1):
            if re.match(rf" +(?:def |[\w.]+\.)?{name.name}(?:\(|: | = )", line):
                return chosen, number
    for pattern in (path, "shared/types/*.py", "shared/interfaces/*.py", "shared/**/*.py"):
        if len(places := _members(pattern).get(name.name, ())) == 1:
            return places[0]
    return UNKNOWN


@cache
def _members(pattern: str) -> dict[str, list[Place]]:
    """Classes, functions, and members of classes, in these files -> where they are."""
    found: dict[str, list[Place]] = {}
    for path in sorted(ROOT.glob(pattern)):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if match := re.match(r"(?: {4}(?:def )?| +self\.|class |def )(\w+)(?:\(|: | = )", line):
                found.setdefault(match[1], []).append((path.relative_to(ROOT).as_posix(), number))
    return found
