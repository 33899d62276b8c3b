"""The input of a clause: named fields and an id.

    Case("page 4", page_size=4).page_size
    grid("page {page_size}, {length} tokens", page_size=(1, 4), length=(0, 3, 5))
    table("size page_size", ("nothing", 0, 1), ("half a page", 2, 4))

The fields suffice to make the input again. `diptych.shared.tools.conformance.clauses.shrink` derives smaller
cases from a case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch

_Case = TypeVar("_Case", bound="Case")
Name = str | Callable[..., str]


class Case:
    """Immutable. A subclass defines field defaults as class attributes, and methods. Its `check` raises
    `ValueError` for invalid fields."""

    name: str

    def __init__(self, name: str, **fields: Any) -> None:
        vars(self).update(name=name, **fields)
        self.check()

    def check(self) -> None:
        """Called when a case is made."""

    def fields(self) -> dict[str, Any]:
        """Field -> value: name, defaults of the class, own fields."""
        defaults = {
            name: value
            for cls in reversed(type(self).__mro__[:-1])
            for name, value in vars(cls).items()
            if not name.startswith("_") and not callable(value) and not isinstance(value, property)
        }
        return {"name": self.name, **defaults, **vars(self)}

    def replace(self: _Case, **changes: Any) -> _Case:
        return type(self)(**{**self.fields(), **changes})

    def __getattr__(self, name: str) -> Any:
        """Only for type checkers: fields are attributes."""
        raise AttributeError(f"{self!r} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a case is immutable: {name}={value!r}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fields() == self.fields()

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


EXAMPLE = (Case("example"),)
"""The case of a clause that has one worked example and nothing to vary."""


def grid(name: Name, *, of: type[Case] = Case, **axes: Any) -> tuple[Any, ...]:
    """All combinations of the axes; the last axis changes fastest. An axis is a tuple, list or range of
    values; any other value is that of every case. `name`: a format string, or a function, of the fields."""
    values = [axis if isinstance(axis, (tuple, list, range)) else (axis,) for axis in axes.values()]
    return tuple(_named(name, of, dict(zip(axes, point))) for point in product(*values))


def table(
    fields: str,
    *rows: tuple[Any, ...],
    name: Name = "",
    of: type[Case] = Case,
    **constants: Any,
) -> tuple[Any, ...]:
    """A case for each row, which has the values of `fields` (separated by blanks). `name`: as in `grid`;
    without it each row begins with its name. `constants` are fields of every case, and the defaults of values
    that a row leaves out at its end."""
    keys = fields.split() if name else ["name", *fields.split()]
    assert all(len(row) <= len(keys) for row in rows), f"rows of more than {keys}"
    points = [{**constants, **dict(zip(keys, row))} for row in rows]
    return tuple(_named(name, of, point) if name else of(**point) for point in points)


def page_sizes(*sizes: int) -> tuple[Case, ...]:
    """Page sizes of a clause that must hold for any page size."""
    return grid("page {page_size}", page_size=sizes)


def _named(name: Name, of: type[_Case], fields: dict[str, Any]) -> _Case:
    texts = {key: _text(value) for key, value in fields.items()}
    return of(name(**fields) if callable(name) else name.format(**texts), **fields)


def _text(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return value


def fields_of(value: Any) -> dict[str, Any] | None:
    """Field -> value of a case or of a dataclass within it; None: it is neither."""
    if isinstance(value, Case):
        return value.fields()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclass_fields(value)}
    return None


def with_field(value: Any, name: str, new: Any) -> Any:
    """A copy of a case or dataclass with another value of one field."""
    return value.replace(**{name: new}) if isinstance(value, Case) else replace(value, **{name: new})
