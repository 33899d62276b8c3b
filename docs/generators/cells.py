"""Cells of tables from results, as templates: "{step_s.median:ms3}", "{1.rate/0.rate:.2f}".

A field is a path of keys and of indices in a result, or the quotient of two. Its format is a unit with a
number of digits, or one of Python's. What a result does not have is an empty text.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

UNITS = {
    "n": (1.0, 0, ""),
    "ms": (1e3, 2, ""),
    "us": (1e6, 0, ""),
    "%": (100.0, 1, " %"),
    "KiB": (1 / 1024, 0, ""),
    "T": (1e-12, 0, ""),
}
"""Unit -> (its number in one of the result, digits, what follows)."""


def at(result: Any, path: str) -> Any:
    for key in path.split("."):
        if result is not None:
            result = result.get(key) if isinstance(result, dict) else result[int(key)]
    return result


class _Cells(string.Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Any) -> tuple[Any, str]:
        over, _, under = field_name.partition("/")
        value = at(args[0], over)
        return (value / at(args[0], under) if under else value), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        unit = format_spec.rstrip("0123456789")
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list):
            return str(len(value)) if format_spec == "len" else ", ".join(map(str, value))
        if unit not in UNITS:
            return format(value, format_spec)
        factor, digits, tail = UNITS[unit]
        return f"{value * factor:,.{format_spec.removeprefix(unit) or digits}f}{tail}"


def cell(template: str, result: Any) -> str:
    return _Cells().vformat(template, (result,), {})
