"""Arguments that a model writes as text between tags, as JSON by the types of the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from diptych.shared.dialects.parts.json_calls import MAX_CHECKED_CHARS, dumps
from diptych.shared.interfaces.dialect import Steps, Stream

_CONTAINERS = {"{": "object", "[": "array"}

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(rf"{_INTEGER.pattern}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_EXPONENT = 400
"""Of an integer that is written out."""
_OF_VALUE = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class ObjectWriter:
    """Gives out the arguments of a call as one JSON object, key by key."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._before = "{"

    def key(self, name: str) -> None:
        """The value comes next."""
        self._stream.arguments(f"{self._before}{dumps(name)}: ")
        self._before = ", "

    def end(self) -> None:
        self._stream.arguments("}" if self._before == ", " else "{}")


def read_value(stream: Stream, types: frozenset[str], end: str) -> Steps[None]:
    """A value up to the marker `end`, as JSON. A newline at each side is no part of it. A text streams; other
    values come when they are complete."""
    if types == {"string"}:
        yield from read_text(stream, end, strips_newlines=True)
        return
    parts: list[str] = []
    num_chars, form = 0, ""

    def emit(text: str) -> None:
        """A long value streams unchecked, but for the last newline: an object or array as it is, else as a
        text."""
        nonlocal num_chars, form
        parts.append(text)
        num_chars += len(text)
        if num_chars <= MAX_CHECKED_CHARS:
            return
        whole = "".join(parts)
        if not form:
            whole = whole.removeprefix("\n")
            kind = _CONTAINERS.get(whole.lstrip()[:1])
            form = "container" if kind is not None and (not types or kind in types) else "text"
            stream.arguments('"' if form == "text" else "")
        parts[:] = ["\n"] if whole.endswith("\n") else []
        whole = whole.removesuffix("\n")
        stream.arguments(dumps(whole)[1:-1] if form == "text" else whole)

    if not (yield from stream.until(end, emit=emit)):
        return
    if not form:
        stream.arguments(as_json("".join(parts).removeprefix("\n").removesuffix("\n"), types))
    elif form == "text":
        stream.arguments('"')


def read_text(stream: Stream, end: str, strips_newlines: bool = False) -> Steps[None]:
    """A text up to the marker `end`, as a JSON string that streams."""
    held, is_first = "", True

    def emit(text: str) -> None:
        nonlocal held, is_first
        if strips_newlines:
            text = text.removeprefix("\n") if is_first else held + text
            held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        is_first = False
        stream.arguments(dumps(text)[1:-1])

    stream.arguments('"')
    if (yield from stream.until(end, emit=emit)):
        stream.arguments('"')


def types_of(schema: Any, name: str) -> frozenset[str]:
    """The JSON types that an argument may have, through references and unions. Empty: any."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    known = properties.get(name) if isinstance(properties, dict) else None
    return _types(known, schema, 0)


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, (str, list)):
        return frozenset(
            [named] if isinstance(named, str) else [each for each in named if isinstance(each, str)]
        )
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_OF_VALUE.get(type(value), "null") for value in values)
    if isinstance(schema.get("$ref"), str):
        return _types(target_of(root, schema["$ref"]), root, depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(keyword), list):
            return frozenset().union(*(_types(each, root, depth + 1) for each in schema[keyword]))
    return frozenset()


def target_of(root: Any, reference: str) -> Any:
    """What a reference within the document names; None: nothing."""
    for step in reference.removeprefix("#").split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def as_json(text: str, types: frozenset[str]) -> str:
    """A value of the first type that the text can be, in the order null, integer, number, boolean, object,
    array; else the text as a JSON string."""
    plain = text.strip()
    if (not types or "integer" in types) and _INTEGER.fullmatch(plain):  # as below, for long lists
        return plain
    for kind, convert in _CONVERSIONS.items():
        if (not types or kind in types) and (found := convert(plain)) is not None:
            return found
    return dumps(text)


def _integer(text: str) -> str | None:
    if _INTEGER.fullmatch(text) or not _NUMBER.fullmatch(text):
        return text if _INTEGER.fullmatch(text) else None
    try:
        value = Decimal(text)  # no digit is lost
    except InvalidOperation:  # an exponent of many digits
        return None
    is_whole = value.adjusted() < _MAX_EXPONENT and value == value.to_integral_value()
    return str(int(value)) if is_whole else None


def _container(text: str, bracket: str) -> str | None:
    if not text.startswith(bracket) or len(text) > MAX_CHECKED_CHARS:
        return text if text.startswith(bracket) else None
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(name: str) -> None:
    """NaN and Infinity are no JSON."""
    raise ValueError(name)


_CONVERSIONS: dict[str, Callable[[str], str | None]] = {
    "null": lambda text: "null" if text in ("null", "None") else None,
    "integer": _integer,
    "number": lambda text: text if _NUMBER.fullmatch(text) else None,
    "boolean": lambda text: text.lower() if text.lower() in ("true", "false") else None,
    "object": lambda text: _container(text, "{"),
    "array": lambda text: _container(text, "["),
}
