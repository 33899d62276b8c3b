"""Mutants of a source file: changes of one operator, constant or statement, found in its syntax tree."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&"), ast.Pow: ("**", "*"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Messages, imports and internal checks: a change there is no change of what the engine computes.
SKIPPED = (ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.JoinedStr)


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of the file `path` become `new`. `function` is the qualified name of the
    function around them, "" at module level. `first_line` to `last_line` is the statement, or the head of
    the compound statement, that is changed; `at_import` says that it runs when the module is imported."""

    path: str
    function: str
    start: int
    end: int
    old: str
    new: str
    first_line: int
    last_line: int
    at_import: bool
    number: int = 0  # of equal changes in one function

    @property
    def key(self) -> str:
        """Name that stays when lines move."""
        return f"{self.path}::{self.function}: {self.old} -> {self.new} #{self.number}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """The mutants of a file, in the order of the text."""
    found = sorted(_Finder(path, source).found(), key=lambda m: (m.start, m.end, m.new))
    counts: Counter[str] = Counter()
    numbered = []
    for mutant in found:
        numbered.append(replace(mutant, number=counts[mutant.key]))
        counts[mutant.key] += 1
    return numbered


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.scope: tuple[str, ...] = ()
        self.lines = (1, 1)
        self.at_import = True

    def found(self) -> Iterator[Mutant]:
        yield from self.visit(ast.parse(self.source))

    def visit(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, SKIPPED) or _is_guard(node):
            return
        outer = self.lines, self.at_import, self.scope
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            self.lines = (node.lineno, last)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                self.scope = (*self.scope, node.name)
                yield from self.visit_all(d for d in [*node.args.defaults, *node.args.kw_defaults] if d)
                self.at_import = False
                yield from self.visit_all(node.body)
        elif isinstance(node, ast.ClassDef):
            self.scope = (*self.scope, node.name)
            yield from self.visit_all(node.body)
        else:
            yield from self.changes(node)
            if not isinstance(node, ast.Raise):
                annotation = getattr(node, "annotation", None)
                yield from self.visit_all(c for c in ast.iter_child_nodes(node) if c is not annotation)
        self.lines, self.at_import, self.scope = outer

    def visit_all(self, nodes: object) -> Iterator[Mutant]:
        for node in nodes:  # type: ignore[attr-defined]
            yield from self.visit(node)

    def changes(self, node: ast.AST) -> Iterator[Mutant]:
        """The changes of this node itself."""
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for op, left, right in zip(node.ops, operands, operands[1:]):
                yield from self.operator(op, left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:]):
                yield from self.operator(node.op, left, right)
        elif isinstance(node, ast.BinOp) and not any(map(_is_sequence, (node.left, node.right))):
            yield from self.operator(node.op, node.left, node.right)
        elif isinstance(node, ast.AugAssign):
            yield from self.operator(node.op, node.target, node.value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            if isinstance(node.op, ast.Not) or not isinstance(node.operand, ast.Constant):
                yield self.change(node, f"({self.text(node.operand)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            yield self.change(node, str(not node.value) if type(node.value) is bool else str(node.value + 1))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in NAMES:
            yield self.change(node.func, NAMES[node.func.id])  # type: ignore[attr-defined]
        elif isinstance(node, (ast.Raise, ast.Break)) or _is_call(node):
            yield self.change(node, "pass")
        elif isinstance(node, ast.Continue):
            yield self.change(node, "break")
        elif isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
            yield self.change(node, "return None")
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None:
                    yield self.change(bound, "None")
        tests = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else getattr(node, "ifs", [])
        for test in tests:  # the opposite of `not x` and of `x == y` is a change of these nodes
            if not isinstance(test, (ast.UnaryOp, ast.Compare)):
                yield self.change(test, f"(not ({self.text(test)}))")

    def operator(self, op: ast.AST, left: ast.AST, right: ast.AST) -> Iterator[Mutant]:
        """The change of the operator between two operands."""
        if type(op) not in OPERATORS:
            return
        old, new = OPERATORS[type(op)]
        start, end = self.range(left)[1], self.range(right)[0]
        match = re.search(_pattern(old), self.source[start:end])
        if match and b"#" not in self.source[start:end]:
            yield self.made(start + match.start(), start + match.end(), new)

    def change(self, node: ast.AST, new: str) -> Mutant:
        return self.made(*self.range(node), new)

    def made(self, start: int, end: int, new: str) -> Mutant:
        old = self.source[start:end].decode()
        return Mutant(self.path, ".".join(self.scope), start, end, old, new, *self.lines, self.at_import)

    def text(self, node: ast.AST) -> str:
        start, end = self.range(node)
        return self.source[start:end].decode()

    def range(self, node: ast.AST) -> tuple[int, int]:
        start = self.line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _pattern(operator: str) -> bytes:
    words = rb"\s+".join(re.escape(word).encode() for word in operator.split())
    return rb"\b" + words + rb"\b" if operator[0].isalpha() else words


def _is_sequence(node: ast.AST) -> bool:
    """A text or list: another operator is a TypeError, which any test notices."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return text or isinstance(node, (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple))


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))


def _is_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
