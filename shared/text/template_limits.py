"""Limits of single operations in a chat template, which comes with the model.

`time_limit` ends a template between two of its lines. One operation can take longer than any limit:
`'a' * 2000000000` takes minutes, because Jinja computes it when it compiles the template. So operations that
make large values from small ones are checked before they run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SIZE = 100_000_000
"""Characters or items that one operation may make from smaller values."""

MAX_LOOPED = 5_000_000
"""Characters or items that one operation may visit in C, where no time limit ends it."""
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


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Raises `TemplateRuntimeError` for an operation with a result of more than MAX_SIZE."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters = _Filters({name: _bounded(name, function) for name, function in self.filters.items()})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            check("format", (left, *(right if isinstance(right, tuple) else (right,))))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            refuse_above(left.bit_length() * right, "**")
        elif operator == "*" and not (_is_number(left) and _is_number(right)):
            refuse_above(_size(left) * _size(right), "*")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
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
    if name not in (*_MULTIPLYING, *_PADDING, *_FORMATTING, *_LOOPING):
        return function

    @wraps(function)  # with the mark of a filter that takes the environment
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(name, (*args, *kwargs.values()))
        return function(*args, **kwargs)

    return checked


def check(name: str, values: tuple[Any, ...]) -> None:
    """Raise for a method of a text, or a filter, whose result could be larger than MAX_SIZE, or that could
    take longer than any time limit."""
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
        refuse_above(max((abs(value) for value in values if isinstance(value, int)), default=0), name)


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
