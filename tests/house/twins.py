"""Checks twin files: `optimized/x.py` has the classes of `reference/x.py` and their methods, with the same
names and parameters, in the same order. (A constructor may take more parameters behind the same ones.)
Module-level functions may differ; functions of the same name have the same parameters. The sources are
parsed, not imported."""

from __future__ import annotations

import ast
from pathlib import Path

Surface = dict[str, list[str]]
"""class.method, or function -> its parameters; in the order of the file. A class itself has no parameters."""


def public_surface(source: str) -> Surface:
    """Public classes, their public methods and constructor, and public functions."""
    surface: Surface = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            surface[node.name] = []
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and (_is_public(item.name) or item.name == "__init__"):
                    surface[f"{node.name}.{item.name}"] = _parameters(item)
        elif isinstance(node, ast.FunctionDef) and _is_public(node.name):
            surface[node.name] = _parameters(node)
    return surface


def twin_differences(reference: str, optimized: str) -> list[str]:
    """The differences that keep two sources from being twins. The optimized one may have names of its own (a
    kernel's launcher, a helper). It has the reference's classes and methods too, with the same parameters, in
    the same order. A class, or a base of it that has its methods, may come from another file of the panel."""
    ours, theirs = public_surface(reference), public_surface(optimized)
    imported, heirs = _imported(optimized), _heirs(optimized)
    required = set()
    for name in _of_classes(reference):
        owner, _, method = name.partition(".")
        if owner not in imported and not (method and owner in heirs):
            required.add(name)
    problems = [f"{name} is missing" for name in ours if name in required and name not in theirs]
    for name, parameters in ours.items():
        given = theirs.get(name, parameters)
        if name.endswith(".__init__"):
            given = given[: len(parameters)]
        if given != parameters:
            problems.append(f"{name} takes ({', '.join(theirs[name])}), not ({', '.join(parameters)})")
    common = [name for name in ours if name in theirs]
    order = [name for name in theirs if name in ours]
    if common != order:
        first = next(a for a, b in zip(common, order) if a != b)
        problems.append(f"{first} is out of order")
    docstring = ast.get_docstring(ast.parse(optimized)) or ""
    if "Differs from reference" not in docstring:
        problems.append('its docstring does not say "Differs from reference"')
    return problems


def twin_files(root: Path) -> list[tuple[Path, Path]]:
    """Pairs of files of one name in both panels."""
    pairs = [
        (path, root / "optimized" / path.relative_to(root / "reference"))
        for path in sorted((root / "reference").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    return [(reference, optimized) for reference, optimized in pairs if optimized.is_file()]


def _of_classes(source: str) -> set[str]:
    """The classes of a source's surface, and their methods."""
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return {name for name in public_surface(source) if name.partition(".")[0] in classes}


def _imported(source: str) -> set[str]:
    """Names that a source imports from its panel."""
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name
        for node in imports
        if str(node.module).startswith("diptych.optimized.")
        for alias in node.names
    }


def _heirs(source: str) -> set[str]:
    """Classes of which a source imports a base from its panel."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if {*map(ast.unparse, node.bases)} & _imported(source)}


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [f"{argument.arg}=" for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return names
