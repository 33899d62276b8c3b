"""One definition of a flag: a dataclass field with its default, help, group and range. Checks of values,
options of the command line and the page of flags are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Flag:
    """`kind` is bool, int, float, str, Mapping (of texts to texts) or tuple (of distinct integers)."""

    group: str
    help: str
    short: str = ""  # one-letter option
    metavar: str = ""
    at_least: int | None = None  # an integer flag, or each integer of a tuple
    above: float | None = None
    below: float | None = None
    name: str = ""
    kind: Any = str
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    default: Any = None

    def check(self, value: Any) -> None:
        """Raise `ValueError` with name, value and what is allowed."""
        if not self._allows(value):
            raise ValueError(f"{self.name} must be {self.allowed}, got {value!r:.200}")

    def _allows(self, value: Any) -> bool:
        if value is None:
            return self.is_optional
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if self.kind is Mapping:
            return isinstance(value, Mapping) and all(isinstance(x, str) for x in (*value, *value.values()))
        if self.kind is tuple:
            is_list = isinstance(value, (tuple, list)) and all(self._is_integer(each) for each in value)
            return is_list and len(value) == len(set(value)) > 0
        if self.kind is int:
            return self._is_integer(value)
        if self.kind is float:
            return self._is_number(value)
        return isinstance(value, self.kind)

    def _is_integer(self, value: Any) -> bool:
        at_least = -MAX_INTEGER if self.at_least is None else self.at_least
        return type(value) is int and at_least <= value <= MAX_INTEGER

    def _is_number(self, value: Any) -> bool:
        if type(value) not in (int, float) or not abs(value) <= MAX_INTEGER:
            return False
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)

    @property
    def allowed(self) -> str:
        """What a value may be: "an integer >= 1 or None"."""
        at_least = "" if self.at_least is None else f" >= {self.at_least}"
        bounds = ((">", self.above), ("<", self.below))
        limits = [f" {sign} {bound:g}" for sign, bound in bounds if bound is not None]
        kinds = {
            bool: "True or False",
            int: f"an integer{at_least}",
            float: f"a number{' and'.join(limits)}",
            str: "a text",
            Mapping: "a mapping of texts to texts",
            tuple: f"a tuple of distinct integers{at_least}",
        }
        text = f"one of {', '.join(self.choices)}" if self.choices else kinds[self.kind]
        return text + " or None" * self.is_optional

    def parse(self, text: str) -> Any:
        """The value of "NAME=text". A tuple has + between its numbers; a mapping has no text."""
        if text.lower() == "none" and self.is_optional:
            return None
        try:
            if self.kind is bool:
                return {"true": True, "false": False}[text.lower()]
            if self.kind is tuple:
                return tuple(int(each) for each in text.split("+"))
            return text if self.choices else self.kind(text)
        except (KeyError, ValueError):
            hint = " separated by '+'" if self.kind is tuple else ""
            raise ValueError(f"{self.name} must be {self.allowed}{hint}, got {text!r}") from None


def flag(group: str, default: Any, help: str, **more: Any) -> Any:
    """A field of a dataclass of flags. The field's annotation says type and choices."""
    metadata = {"flag": Flag(group=group, help=help, default=default, **more)}
    if isinstance(default, Mapping):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@cache
def flags_of(cls: Any) -> dict[str, Flag]:
    """Name -> flag, in the order of the fields."""
    hints = get_type_hints(cls)
    return {each.name: _typed(each.metadata["flag"], each.name, hints[each.name]) for each in fields(cls)}


def _typed(flag: Flag, name: str, hint: Any) -> Flag:
    is_optional = NoneType in get_args(hint)
    if is_optional:
        hint = next(each for each in get_args(hint) if each is not NoneType)
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind = str if choices else get_origin(hint) or hint
    return replace(flag, name=name, kind=kind, choices=choices, is_optional=is_optional)
