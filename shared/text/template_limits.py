"""Limits of a chat template, which comes with the model: of its steps, and of the sizes of its values.

A step is a turn of a loop, a call, a piece of the output, or CHARS_PER_STEP characters that are visited.
The same conversation takes the same number of steps on every computer. An operation that makes a large value
from small ones is checked before it runs: `'a' * 2000000000` would take minutes.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Steps of a template, for one conversation: about 4 s. Gemma 4's takes 192,000 for 600 turns, because it
looks at all turns in each."""

CHARS_PER_STEP = 1000

MAX_SIZE = 100_000_000
"""Characters or items that one operation may make from smaller values."""

MAX_LOOPED = 5_000_000
"""Characters or items that one operation may visit."""
MAX_WRAPPED = 10_000
"""Characters that `wordwrap` may visit: its pattern takes quadratic time in a run of spaces."""

_MULTIPLYING = ("replace", "join")  # the result grows with the product of the text and the arguments
_PADDING = (
    "batch",
    "center",
    "expandtabs",
    "indent",
    "ljust",
    "rjust",
    "slice",
    "tojson",
    "wordwrap",
    "zfill",
)
_LOOPING = (
    "batch", "dictsort", "e", "escape", "forceescape", "groupby", "list", "pprint", "reverse", "rsplit",
    "slice", "sort", "split", "splitlines", "striptags", "sum", "title", "tojson", "unique", "urlencode",
    "urlize", "wordcount", "xmlattr",
)  # fmt: skip
_FORMATTING = ("format", "format_map")
_WIDTH_IS_AN_ARGUMENT = re.compile(r"\*|\{[^}]*\{")


_USED = threading.local()


def start_counting() -> None:
    """The steps of a conversation begin, in this thread."""
    _USED.steps = 0


def spend(num_chars: int = 0) -> None:
    """Count a step, and the characters that an operation visits. Raises `TemplateRuntimeError`."""
    _USED.steps = getattr(_USED, "steps", 0) + 1 + num_chars // CHARS_PER_STEP
    if _USED.steps > MAX_STEPS:
        raise TemplateRuntimeError(f"the template takes more than {MAX_STEPS} steps for this conversation")


class _Counted(NodeTransformer):
    """Loops and concatenations call the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        values: Any = node.iter
        node.iter = _call_of("counted", [values], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_of("concatenated", node.nodes, node.lineno)


def _call_of(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Raises `TemplateRuntimeError` for an operation with a result of more than MAX_SIZE, and for more than
    MAX_STEPS since `start_counting`."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters = _Filters({name: _bounded(name, function) for name, function in self.filters.items()})

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Jinja's hook between its parser and its code."""
        tree = _Counted().visit(source)
        tree.set_environment(self)
        return super()._generate(tree, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As of the sandbox, and `append` and `pop` of a list: Kimi K2's templates keep ids of calls so."""
        if isinstance(obj, list) and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    @staticmethod
    def counted(values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop, each a step."""
        for value in values:
            spend()
            yield value

    @staticmethod
    def concatenated(*values: Any) -> str:
        return BoundedEnvironment.concat(map(str, values))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of pieces: of the output, a macro or a block."""
        found, size = [], 0
        for piece in pieces:
            size += len(piece)
            refuse_above(size, "the output")
            spend(len(piece))
            found.append(piece)
        return "".join(found)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            check("format", (left, *(right if isinstance(right, tuple) else (right,))))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            refuse_above(left.bit_length() * right, "**")
        elif operator == "*" and not (_is_number(left) and _is_number(right)):
            refuse_above(_size(left) * _size(right), "*")
        elif operator == "+" and not (_is_number(left) or _is_number(right)):
            refuse_above(_size(left) + _size(right), "+")
            spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        spend()
        method = inspect.unwrap(function)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            check(method.__name__, (text, *args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)


class _Filters(dict[str, Callable[..., Any]]):
    """Filters that are added to an environment are bounded too."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded(name, function))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    num_context = int(hasattr(function, "jinja_pass_arg"))  # the environment comes before the value

    @wraps(function)  # with the mark of a filter that takes the environment
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(name, (*args[num_context:], *kwargs.values()))
        return function(*args, **kwargs)

    return checked


def check(name: str, values: tuple[Any, ...]) -> None:
    """Raise for a method of a text, or a filter, whose result could be larger than MAX_SIZE, or that visits
    more than MAX_LOOPED. values: the text, or the value that is filtered, then the arguments."""
    spend(sum(len(value) for value in values if isinstance(value, (str, list, tuple, dict))))
    limit = MAX_WRAPPED if name == "wordwrap" else MAX_LOOPED
    if name in (*_LOOPING, "wordwrap"):
        sizes = [_size(value) for value in values if isinstance(value, (str, list, tuple, dict))]
        if max(sizes, default=0) > limit:
            raise TemplateRuntimeError(f"{name!r} may not visit more than {limit} characters or items")
    if name in _MULTIPLYING:
        sizes = [_size(value) for value in values if isinstance(value, (str, list, tuple))]
        refuse_above(sizes[0] * max(sizes[1:], default=1), name)
    if name in _FORMATTING:
        widths = [int(digits[:12]) for digits in re.findall(r"\d+", str(values[0]))]
        if _WIDTH_IS_AN_ARGUMENT.search(str(values[0])):
            widths += [value for value in values[1:] if isinstance(value, int)]
        refuse_above(max(widths, default=0), name)
    if name in _PADDING:
        refuse_above(max((abs(value) for value in values[1:] if isinstance(value, int)), default=0), name)


def refuse_above(size: int, what: str) -> None:
    if size > MAX_SIZE:
        raise TemplateRuntimeError(f"{what!r} may not make more than {MAX_SIZE} characters or items")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return max(len(value), 1) if hasattr(value, "__len__") else 1


def bound_templates() -> None:
    """Let `transformers` compile chat templates in a `BoundedEnvironment`; it has no parameter for that."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    module.ImmutableSandboxedEnvironment = BoundedEnvironment
