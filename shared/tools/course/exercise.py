"""An exercise of the course: its files in the repository, and what is left to write in a learner's file."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

import diptych
from diptych.shared.tools.conformance.clauses.contract_versions import versions_of
from diptych.shared.tools.conformance.clauses.stages import Group, Stage

REPOSITORY = Path(diptych.__file__).parents[1]
WORDS_PER_MINUTE = 200
NEEDS: dict[str, tuple[str, ...]] = {
    "01": (),
    "02": (),
    "03": ("01", "02"),
    "04": ("03",),
    "05": ("02",),
    "06": ("01",),
    "07": ("01", "02"),
    "08": ("01", "07"),
    "09": ("03",),
    "10": ("03", "06"),
    "11": ("01",),
    "12": ("03",),
    "13": ("01",),
    "14": ("01",),
    "15": ("01", "05"),
}
"""stage -> the stages to read before it. They need not be solved: all other parts are the reference's."""

FLAGS: dict[str, str] = {
    "10": "--speculative eagle3 --speculative-draft-model tiny-dense-eagle3",
    "11": "--model tiny-moe",
    "13": "--tp 2",
    "14": "--panel reference --quantization int4",
    "15": "--model tiny-hybrid",
}
"""stage -> the flags with which an engine uses its part, where the default ones have no use for it."""


@dataclass(frozen=True)
class Todo:
    """A function that is not written."""

    group: str
    name: str  # "MyCache.insert"
    line: int
    what: str


def skeleton_of(stage: Stage) -> Path:
    """The file to copy. An installation without the repository raises `ValueError`."""
    path = REPOSITORY / stage.skeleton_path
    if not path.is_file():
        raise ValueError(
            f"the exercises are in the repository, and {REPOSITORY} has no {stage.skeleton_path}: "
            "clone it, and run `make run` there"
        )
    return path


def todos_of(source: str) -> list[Todo]:
    """Every `raise NotImplementedError("TODO group: what to do")` of a file, in its order."""
    found: list[Todo] = []

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names = (*names, node.name)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            if ast.unparse(node.exc.func) == "NotImplementedError" and isinstance(text, ast.Constant):
                head, _, what = str(text.value).partition(":")
                if head.startswith("TODO "):
                    found.append(Todo(head.removeprefix("TODO "), ".".join(names), node.lineno, what.strip()))
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    visit(ast.parse(source), ())
    return found


def fingerprint(source: str) -> str:
    """A digest of the code without comments, docstrings and layout: what they change, no grade changes. Of a
    file that is no Python, the digest of its text."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return _digest(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return _digest(ast.dump(tree))


def grade_key(stage: Stage, group: Group, source: str) -> str:
    """What a grade is valid for: the file's code, the version of the contract, and the group's clauses."""
    parts = [fingerprint(source), versions_of(stage.component)[-1], *group.clauses]
    return _digest("\n".join(parts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def reading_minutes(stage: Stage) -> int | None:
    """Minutes for the page of the stage, at 200 words a minute; None without the page."""
    path = REPOSITORY / "docs" / "course" / stage.page
    if not path.is_file():
        return None
    return max(1, round(len(path.read_text(encoding="utf-8").split()) / WORDS_PER_MINUTE))
