"""Solutions of the exercises: `stage_08.py` has the functions that its skeleton leaves open, and no others.
For a stage without such a file the solution is a whole file of the project, by default the reference."""

from __future__ import annotations

import ast
from pathlib import Path

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.stages import Stage

ROOT = Path(__file__).parents[3]
FILES = {  # file:class, where it is not the component's reference
    "05": "docs/examples/my_radix_cache.py:MyRadixCache",
}


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


def whole_file(stage: Stage) -> tuple[Path, str]:
    """(file, class) of a solution that is not made from the skeleton."""
    target = FILES.get(stage.number)
    if target is None:
        module, _, class_name = registry.IMPLEMENTATIONS[stage.component]["reference"].partition(":")
        return ROOT / (module.removeprefix("diptych.").replace(".", "/") + ".py"), class_name
    file, _, class_name = target.partition(":")
    return ROOT / file, class_name


def solution(stage: Stage) -> tuple[str, str]:
    """(source, class) of a complete exercise."""
    if own_functions(stage) is None:
        path, class_name = whole_file(stage)
        return path.read_text("utf-8"), class_name
    return completed(stage, {group.name for group in stage.groups}), stage.class_name


def completed(stage: Stage, groups: set[str]) -> str:
    """The skeleton with the functions of these groups."""
    skeleton = (ROOT / stage.skeleton_path).read_text("utf-8")
    own = own_functions(stage)
    assert own is not None
    source = own.read_text("utf-8")
    written = {(owner, each.name): each for owner, each in _functions(ast.parse(source))}
    groups_of = open_functions(skeleton)
    assert written.keys() == groups_of.keys(), written.keys() ^ groups_of.keys()
    lines = skeleton.splitlines(keepends=True)
    for owner, function in reversed(list(_functions(ast.parse(skeleton)))):
        key = owner, function.name
        if groups_of.get(key) in groups:
            new = written[key]
            text = source.splitlines(keepends=True)[_first(new) - 1 : new.end_lineno]
            lines[_first(function) - 1 : function.end_lineno] = text
    return "".join(lines)


def _functions(module: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    found = []
    for entry in module.body:
        owner, nodes = (entry.name, entry.body) if isinstance(entry, ast.ClassDef) else ("", [entry])
        found += [(owner, node) for node in nodes if isinstance(node, ast.FunctionDef)]
    return found


def _first(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])
