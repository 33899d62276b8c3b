"""Rules for names of files, lengths of functions, and docstrings."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
from tree import ROOT, nodes, python_files

CODE = ("shared", "reference", "optimized")
MAX_FUNCTION_LINES = 60

NAMED_FOR_OTHERS = (
    "shared/interfaces/",  # a component's
    "shared/types/",  # a component's
    "shared/tools/conformance/contracts/",  # the folder says of what
    "shared/tools/commands/",  # a command's
)
"""Rooms whose files have the name of what they are for, wherever else that name is."""


def test_no_two_files_have_one_name() -> None:
    """Twins have it: one path in both panels."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in python_files(*CODE):
        if not path.as_posix().startswith(NAMED_FOR_OTHERS) and not path.name.startswith("__"):
            inside = path if path.parts[0] == "shared" else path.relative_to(path.parts[0])
            places[path.name].add(inside.as_posix())
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1} == {}


def functions(found: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in found:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, is_command: bool) -> int:
    """Lines from `def` on. Of a command only those below its options and its help."""
    start = function.lineno
    if is_command:
        body = function.body[1:] if ast.get_docstring(function) else function.body
        start = body[0].lineno if body else function.lineno
    return (function.end_lineno or start) - start + 1


def test_functions_are_short() -> None:
    """Kernels are not counted."""
    wrong = []
    for path in python_files(*CODE):
        name = path.as_posix()
        if name.startswith("optimized/kernels/"):
            continue
        for function in functions(nodes(path)):
            length = num_lines(function, name.startswith("shared/tools/commands/"))
            if length > MAX_FUNCTION_LINES:
                wrong.append(f"{name}:{function.lineno}: {function.name} has {length} lines")
    assert wrong == []


@pytest.mark.parametrize(("is_command", "length"), [(False, 5), (True, 1)])
def test_the_help_of_a_command_does_not_count(is_command: bool, length: int) -> None:
    source = '@command\ndef f(\n    x,\n):\n    """Help."""\n    return x\n'
    (function,) = functions(ast.walk(ast.parse(source)))
    assert num_lines(function, is_command) == length


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def test_docstrings_begin_with_their_subject_or_verb() -> None:
    sources = {path: (ROOT / path).read_text("utf-8") for path in python_files(*CODE, "tests")}
    wrong = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, source in sources.items()
        if re.search(r"""["'][\\\s]*Of """, source)  # parsing takes the most of the time
        for line, text in docstrings(source)
        if text.startswith("Of ") and "mutants" not in path.parts
    ]
    assert wrong == []
