"""What every body of a request has in common.

A field that no body has is ignored or refused by the table of fields, or else refused by name. `null` and
`false` are accepted anywhere, because public clients send their defaults. Validation ends at the first wrong
value of a list.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from diptych.shared.server.api.field_table import log_ignored, rules
from diptych.shared.server.http.limits import MAX_NAMES, MAX_OBJECTS

INVALID = "texts must be valid Unicode, and numbers finite"
PIECE = 2**15
_SURROGATE = re.compile("[\ud800-\udfff]")


def _bound(schema: Any) -> None:
    """Every list of a body ends at its first wrong entry, and what has a cost per object has a limit."""
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
        if schema.get("items_schema", {}).get("type") not in ("int", "float", "str", "list"):
            schema.setdefault("max_length", MAX_OBJECTS)
    for child in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        if isinstance(child, (dict, list)):
            _bound(child)


class Body(BaseModel):
    """Base of all bodies. `place`: where the table of fields has rules for it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        _check_values(data)
        names = {field.alias or name for name, field in cls.model_fields.items()}
        found = {
            name: value
            for name, value in data.items()
            if value is not None and (name in names or value is not False)
        }
        for name in [name for name in found if name not in names]:
            cls._ignore(name)
            del found[name]
        return found

    @classmethod
    def _ignore(cls, name: str) -> None:
        """Raise for a field that is not ignored. The first one: pydantic would report each."""
        rule = rules(cls.place).get(name)
        if rule is None:
            raise _error_at(name, "extra_forbidden")
        if not rule.is_ignored:
            raise _error_at(name, PydanticCustomError("refused_field", "{reason}", {"reason": rule.reason}))
        log_ignored(cls.place, name, rule.reason)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound(schema)
        return schema


def _error_at(name: str, kind: Any) -> ValidationError:
    return ValidationError.from_exception_data("body", [{"type": kind, "loc": (name,), "input": None}])


def _check_values(data: dict[str, Any]) -> None:
    """Refuse what JSON has and no later step can take."""
    for name, value in data.items():
        problem = _problem_of(name) or _problem_of(value)
        if problem:
            where = "" if _problem_of(name) else name
            raise _error_at(where, PydanticCustomError("invalid_value", problem))


def _problem_of(value: Any) -> str:
    """What is wrong with a JSON value, which may be nested deeply: half of a surrogate pair, a number like
    1e999, or an object with so many names that errors about all of them would take long."""
    open_values = [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            if len(value) > MAX_NAMES:
                return f"an object has at most {MAX_NAMES} names"
            open_values += [*value, *value.values()]
        elif isinstance(value, list):
            open_values += value if not _are_ints(value) else []
        elif isinstance(value, str):
            if not value.isascii() and _SURROGATE.search(value):
                return INVALID
        elif isinstance(value, float) and not math.isfinite(value):
            return INVALID
    return ""


def _are_ints(values: list[Any]) -> bool:
    """Token ids need no look. In pieces: one call would keep other threads waiting."""
    return all({*map(type, values[i : i + PIECE])} == {int} for i in range(0, len(values), PIECE))
