"""Copies of the project's modules with a few words of their source changed: planted bugs, or ways that are
seldom taken made the only ones."""

from __future__ import annotations

import ast
import importlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_FOLDER = tempfile.TemporaryDirectory(prefix="changed_modules_")


class Change(NamedTuple):
    """In a module (its name below `diptych`), `before`, wherever it occurs, becomes `after`."""

    module: str
    before: str
    after: str


@cache
def changed_copies(entry: str, *changes: Change) -> dict[str, ModuleType]:
    """Name below `diptych` -> copy, of the changed modules, of `entry`, and of the modules between them:
    those that `entry` imports, directly or not, and that import a changed one. Other modules are shared. An
    import within a function finds the original."""
    if not changes:
        return {entry: importlib.import_module(f"diptych.{entry}")}
    targets = {f"diptych.{change.module}" for change in changes}
    importlib.import_module(f"diptych.{entry}")
    affected = {name for name in _reachable(f"diptych.{entry}") if _reachable(name) & targets}
    assert targets <= affected, f"{entry} imports no {sorted(targets - affected)}"
    finder = _Finder(changed_files(changes))
    originals = {name: sys.modules.pop(name) for name in affected if name in sys.modules}
    for name, module in originals.items():
        parent, _, leaf = name.rpartition(".")
        if vars(sys.modules.get(parent, module)).get(leaf) is module:
            delattr(sys.modules[parent], leaf)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(f"diptych.{entry}")
        return {name.removeprefix("diptych."): sys.modules[name] for name in affected}
    finally:
        sys.meta_path.remove(finder)
        for name in affected:
            sys.modules.pop(name, None)
        sys.modules.update(originals)
        for name, module in originals.items():
            parent, _, leaf = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], leaf, module)


def changed(entry: str, *changes: Change) -> ModuleType:
    """The copy of `entry` alone."""
    return changed_copies(entry, *changes)[entry]


class _Finder:
    """Finds changed modules in their own files: Triton and tracebacks read the source again."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.files[name]) if name in self.files else None


def changed_texts(changes: Sequence[Change]) -> dict[str, str]:
    """Full name of a changed module -> its source."""
    texts: dict[str, str] = {}
    for module, before, after in changes:
        name = f"diptych.{module}"
        text = texts.get(name) or _source(name)
        assert before in text, f"{module} has no {before!r}"
        texts[name] = text.replace(before, after)
    return texts


def changed_files(changes: Sequence[Change]) -> dict[str, Path]:
    """Full name of a changed module -> the file with its source."""
    texts = changed_texts(changes)
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    files = {name: folder / f"{name.rpartition('.')[2]}.py" for name in texts}
    assert len(set(files.values())) == len(files), "two changed modules of one name"
    for name, path in files.items():
        path.write_text(texts[name], "utf-8")
    return files


@cache
def _reachable(name: str) -> frozenset[str]:
    """The module and what it imports, directly or not, at import time."""
    found, stack = {name}, [name]
    while stack:
        for other in _imports(stack.pop()) - found:
            found.add(other)
            stack.append(other)
    return frozenset(found)


@cache
def _imports(name: str) -> frozenset[str]:
    """Modules of the project that a module imports when it is imported."""
    names = {
        full
        for node in _outside_functions(ast.parse(_source(name)))
        for base in _names(node)
        for full in (base, base.rpartition(".")[0])
        if full.startswith("diptych.") and _file(full) is not None
    }
    return frozenset(names - {name})


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_for_types(node):
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _source(name: str) -> str:
    path = _file(name)
    assert path is not None, f"there is no module {name}"
    return path.read_text("utf-8")


@cache
def _file(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
