"""Solutions of the exercises: `stage_08.py` has the functions that its skeleton leaves open, and no others.
For a stage without such a file the solution is a whole file of the project, by default the reference."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.stages import Stage

ROOT = Path(__file__).parents[3]
WHOLE = {"05": "docs.examples.my_radix_cache:MyRadixCache"}  # where it is not the component's reference
FUTURE = "from __future__ import annotations\n"
NAMES = """
import importlib
globals().update({{k: v for k, v in vars(importlib.import_module("{module}")).items() if k[:2] != "__"}})
"""


def open_functions(skeleton: str) -> dict[tuple[str, str], str]:
    """(class, function) -> the group of its `NotImplementedError("TODO group: what to do")`. The class of a
    function of the module is ""."""
    found = {}
    for owner, function in _functions(ast.parse(skeleton)):
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
                text = node.exc.args[0].value  # type: ignore[union-attr]
                found[owner, function.name] = text.removeprefix("TODO ").partition(":")[0]
    return found


def own_functions(stage: Stage) -> Path | None:
    """The file with the functions of a skeleton, if the stage has one."""
    path = Path(__file__).with_name(f"stage_{stage.number}.py")
    return path if path.is_file() else None


def whole_file(stage: Stage) -> tuple[ModuleType, str]:
    """(module, class) of a solution that is not made from the skeleton."""
    target = WHOLE.get(stage.number) or registry.IMPLEMENTATIONS[stage.component]["reference"]
    module, _, class_name = target.partition(":")
    return importlib.import_module(module), class_name


def solution(stage: Stage) -> tuple[str, str]:
    """(source, class) of a complete exercise."""
    if own_functions(stage) is None:
        module, class_name = whole_file(stage)
        return inspect.getsource(module), class_name
    return completed(stage, {group.name for group in stage.groups}), stage.class_name


def completed(stage: Stage, groups: set[str]) -> str:
    """The skeleton with the functions of these groups. Those of a whole file find the names of their modules
    where the skeleton does not have them."""
    skeleton = (ROOT / stage.skeleton_path).read_text("utf-8")
    groups_of = open_functions(skeleton)
    own = own_functions(stage)
    written = {key: _of_whole_file(stage, *key) for key in groups_of} if own is None else _of_own_file(own)
    assert written.keys() == groups_of.keys(), written.keys() ^ groups_of.keys()
    lines = skeleton.splitlines(keepends=True)
    for owner, function in reversed(list(_functions(ast.parse(skeleton)))):
        if groups_of.get((owner, function.name)) in groups:
            lines[_first(function) - 1 : function.end_lineno] = written[owner, function.name][0]
    modules = dict.fromkeys(module for _, module in written.values() if module)
    names = "".join(NAMES.format(module=module) for module in modules)
    assert FUTURE in lines
    return "".join(lines).replace(FUTURE, FUTURE + names, 1)


def _of_own_file(path: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """(class, function) -> its text; it needs no names of a module."""
    source = path.read_text("utf-8")
    lines = source.splitlines(keepends=True)
    return {
        (owner, each.name): ("".join(lines[_first(each) - 1 : each.end_lineno]), "")
        for owner, each in _functions(ast.parse(source))
    }


def _of_whole_file(stage: Stage, owner: str, function: str) -> tuple[str, str]:
    """The text of a function of the solution, which may inherit it, and its module."""
    module, class_name = whole_file(stage)
    place = (getattr(module, owner, None) or getattr(module, class_name)) if owner else module
    found = inspect.getattr_static(place, function)
    found = getattr(found, "fget", found)
    return inspect.getsource(found), found.__module__


def _functions(module: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    found = []
    for entry in module.body:
        owner, nodes = (entry.name, entry.body) if isinstance(entry, ast.ClassDef) else ("", [entry])
        found += [(owner, node) for node in nodes if isinstance(node, ast.FunctionDef)]
    return found


def _first(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])
