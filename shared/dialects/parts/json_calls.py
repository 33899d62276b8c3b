"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
import math
from typing import Any

from diptych.shared.interfaces.dialect import NotACall, Steps, Stream

MAX_CHECKED_CHARS = 65536
"""Reading a longer value at once would take the event loop's time."""
ANY_OBJECT = {"type": "object", "additionalProperties": True}
"""The schema of arguments that have none."""
ARGUMENT_KEYS = ("arguments", "parameters")
KNOWN_KEYS = (*ARGUMENT_KEYS, "name", "id", "type", "function")


def dumps(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def loads(text: str) -> Any:
    """The value of a JSON text. What Python has no number for is a text as it was written: numbers beyond a
    float, integers of thousands of digits, NaN and Infinity. Half of a surrogate pair is "?". Raises
    `ValueError` or `RecursionError`."""
    value = json.loads(text, strict=False, parse_float=_float, parse_int=_int, parse_constant=str)
    if "\\u" in text:  # half of a pair, perhaps
        value = json.loads(dumps(value).encode("utf-8", "replace"))
    return value


def _float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _int(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def json_object(schema: Any) -> dict[str, Any]:
    """The xgrammar format of arguments in JSON."""
    content = ANY_OBJECT if schema is True else schema
    return {"type": "json_schema", "json_schema": content, "max_whitespace_cnt": 1}


def read_json_calls(stream: Stream) -> Steps[None]:
    """One call or more: objects one after another, or a list of them. Ends behind the last one. Raises
    `NotACall`."""
    yield from stream.space()
    is_list = yield from stream.accept("[")
    while True:
        yield from read_json_call(stream)
        yield from stream.space()
        if is_list and not (yield from stream.accept(",")):
            yield from stream.accept("]")
            return
        if not is_list and (yield from stream.peek()) != "{":
            return
        yield from stream.space()


def read_json_call(stream: Stream, is_bare: bool = False) -> Steps[None]:
    """An object with `name` and arguments, in any order; other keys are left out. The arguments stream if the
    name comes before them. is_bare: no marker has announced it, so it has arguments and names a tool. Raises
    `NotACall`."""
    yield from stream.space()
    if not (yield from stream.accept("{")):
        raise NotACall
    name, call_id, held, is_begun = "", "", "", False
    while not (yield from _closed(stream)):
        key = yield from _value(stream)
        if is_bare and not is_begun and key not in KNOWN_KEYS:
            raise NotACall
        yield from stream.space()
        if not (yield from stream.accept(":")):
            raise NotACall
        yield from stream.space()
        if key in ARGUMENT_KEYS and name and not is_begun:
            is_begun = True
            stream.call(name, call_id)
            yield from read_arguments(stream)
        elif key in ARGUMENT_KEYS:
            held = yield from _raw(stream)
        else:
            value = yield from _value(stream)
            if key == "name" and isinstance(value, str):
                name = value
                if is_bare and name not in stream.tools:
                    raise NotACall
            elif key == "id" and isinstance(value, str):
                call_id = value
        yield from stream.space()
        yield from stream.accept(",")
    if not name or (is_bare and not held and not is_begun):
        raise NotACall
    if not is_begun:
        stream.call(name, call_id)
        stream.arguments(_as_object(held or "{}"))


def read_arguments(stream: Stream) -> Steps[None]:
    """A JSON value, given out as it comes. A text that holds an object is that object."""
    if (yield from stream.peek()) in ('"', "n"):
        stream.arguments(_as_object((yield from _raw(stream))))
    else:
        yield from stream.json(stream.arguments)


def _closed(stream: Stream) -> Steps[bool]:
    yield from stream.space()
    return (yield from stream.accept("}"))


def _raw(stream: Stream) -> Steps[str]:
    parts: list[str] = []
    if not (yield from stream.json(parts.append)):
        raise NotACall
    return "".join(parts)


def _value(stream: Stream) -> Steps[Any]:
    try:
        return loads((yield from _raw(stream)))
    except (ValueError, RecursionError):
        raise NotACall from None


def _as_object(text: str) -> str:
    """Arguments that are a text or null, as an object."""
    if not text.startswith(('"', "n")):
        return text
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str) and len(value) > MAX_CHECKED_CHARS:
            return value if value.lstrip()[:1] == "{" and value.rstrip()[-1:] == "}" else text
        inner = loads(value) if isinstance(value, str) else {}
    except (ValueError, RecursionError):
        return text
    return (value if isinstance(value, str) else "{}") if isinstance(inner, dict) else text
