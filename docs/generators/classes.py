"""What the source says about a class: its fields with their comments, and the types that methods name."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).parents[2]
PACKAGES = ("diptych.shared.types", "diptych.shared.interfaces", "diptych.shared.config")
"""Where the types are that components exchange."""


@dataclass
class Field:
    name: str
    type: str
    default: str
    comment: str
    group: str = ""  # the comment above the fields from here on


def named(dotted: str) -> Any:
    """The object "package.module.Name"."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def path_of(obj: Any) -> str:
    """The file that defines a class, from the root: "shared/types/req.py"."""
    return Path(inspect.getfile(obj)).resolve().relative_to(ROOT.resolve()).as_posix()


def summary(obj: Any) -> str:
    """The docstring as Markdown: paragraphs, unindented. Empty for the one that `dataclass` makes."""
    text = inspect.cleandoc(vars(obj).get("__doc__") or "")
    return "" if text.startswith(f"{getattr(obj, '__name__', '')}(") else text


@cache
def fields_of(cls: type) -> tuple[Field, ...]:
    """Annotated attributes (of an Enum: its members), then public properties and methods."""
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, ast.ClassDef)
    found = list(_attributes(node, lines, issubclass(cls, Enum)))
    found += _computed(node)
    return tuple(found)


def _attributes(node: ast.ClassDef, lines: list[str], is_enum: bool) -> Iterator[Field]:
    for child, following in zip(node.body, [*node.body[1:], None]):
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            name, annotation = child.target.id, ast.unparse(child.annotation)
        elif is_enum and isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            name, annotation = child.targets[0].id, ""
        else:
            continue
        if name.startswith("_") or annotation.startswith("ClassVar"):
            continue
        default = "" if child.value is None or is_enum else _default(child.value)
        comments = [line.partition("  # ")[2] for line in lines[child.lineno - 1 : child.end_lineno]]
        before, group = _comment_above(lines, child.lineno)
        text = " ".join(filter(None, [before, *comments, _docstring_after(following)]))
        yield Field(name, annotation, default, text, group)


def _default(value: ast.expr) -> str:
    """`field(default_factory=dict)` reads {}."""
    text = ast.unparse(value)
    for factory, literal in (("list", "[]"), ("dict", "{}")):
        text = text.replace(f"field(default_factory={factory})", literal)
    return text


def _comment_above(lines: list[str], lineno: int) -> tuple[str, str]:
    """Comment lines directly above a field: (about it, or about the group that it begins). A group's comment
    follows an empty line."""
    above: list[str] = []
    i = lineno - 2
    while i >= 0 and lines[i].lstrip().startswith("# "):
        above.insert(0, lines[i].strip()[2:])
        i -= 1
    text = " ".join(above)
    return ("", text) if i >= 0 and not lines[i].strip() else (text, "")


def _docstring_after(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split()) if is_text else ""  # type: ignore[union-attr]


def _computed(node: ast.ClassDef) -> Iterator[Field]:
    for child in node.body:
        if not isinstance(child, ast.FunctionDef) or child.name.startswith("_"):
            continue
        decorators = [ast.unparse(each) for each in child.decorator_list]
        returned = ast.unparse(child.returns) if child.returns else ""
        arguments = ast.unparse(child.args).removeprefix("self").removeprefix(", ")
        name = child.name if "property" in decorators else f"{child.name}({arguments})"
        text = " ".join((ast.get_docstring(child) or "").split("\n\n")[0].split())
        yield Field(name, returned, "computed", text)


def methods_of(cls: type) -> Iterator[Any]:
    for value in vars(cls).values():
        function = value.fget if isinstance(value, property) else value
        if inspect.isfunction(function):
            yield function


def types_reached(classes: list[type]) -> list[type]:
    """The project's types in the signatures and attributes of these classes, and in the fields of those, in
    the order of their discovery; the classes themselves are left out."""
    found: list[type] = []
    queue = list(classes)
    while queue:
        cls = queue.pop(0)
        places = [cls, *(methods_of(cls) if inspect.isabstract(cls) else ())]
        hints = [hint for place in places for hint in _hints(place)]
        for each in [*chain.from_iterable(map(_classes_in, hints)), *_variants(cls)]:
            if each not in found and each not in classes:
                found.append(each)
                if not inspect.isabstract(each):
                    queue.append(each)
    return found


def _hints(place: Any) -> list[Any]:
    """The types of annotations; a name that is imported for type checkers only is Any."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return list(get_type_hints(place, localns=unknown).values())
        except NameError as error:
            unknown[str(error.name)] = Any


def _variants(cls: type) -> list[type]:
    """Subclasses of a plain type in its own module, such as the finish reasons."""
    is_open = inspect.isabstract(cls) or issubclass(cls, (tuple, Enum))
    subclasses: list[type] = cls.__subclasses__()
    return [] if is_open else [sub for sub in subclasses if sub.__module__ == cls.__module__]


def _classes_in(hint: Any) -> Iterator[type]:
    for argument in get_args(hint):
        yield from _classes_in(argument)
    if inspect.isclass(hint) and hint.__module__.startswith(PACKAGES):
        yield hint
