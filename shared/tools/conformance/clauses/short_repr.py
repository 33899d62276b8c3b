"""A short repr for dataclasses, so that a sequence of them stays readable."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any


def short_repr(value: Any) -> str:
    """Like a dataclass's own repr, without the fields that have their defaults. Use: `__repr__ = short_repr`
    in a dataclass with repr=False."""
    shown = []
    for field in fields(value):
        actual = getattr(value, field.name)
        if field.default is MISSING:
            shown.append(repr(actual))
        elif actual != field.default:
            shown.append(f"{field.name}={actual!r}")
    return f"{type(value).__name__}({', '.join(shown)})"
