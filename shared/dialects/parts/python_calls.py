"""Calls in Python, `f(x=1, s='a')`: keyword arguments with literals, which become JSON as they come."""

from __future__ import annotations

import re
from typing import Any

from diptych.shared.dialects.parts.json_calls import dumps
from diptych.shared.dialects.parts.typed_values import ObjectWriter
from diptych.shared.dialects.parts.xml_arguments import json_format
from diptych.shared.interfaces.dialect import NotACall, Steps, Stream
from diptych.shared.text.control_text import CONTROLS

MAX_DEPTH = 32
"""Of lists and dictionaries in one another."""

KEYWORDS = {"type", "properties", "required", "additionalProperties", "$defs"}
ANNOTATIONS = {"title", "description", "$schema"}

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"\+?(-?)([0-9_]*)(\.?)([0-9_]*)([eE][+-]?[0-9]+)?")
_CLOSING = {"[": "]", "(": ")", "{": "}"}

# What most containers consist of is read as the rest of the literals is, only faster: an item up to its comma
# or to the bracket behind it, or up to the bracket with which it begins; and the closing bracket.
_GAP, _PLAIN, _WORD = r"\s{0,64}", rf"\\\x00-\x1f{CONTROLS}", r"[\w.+-]{1,64}"
_DOUBLE = rf'"[^"{_PLAIN}]*(?:\\[ntrbf\\"][^"{_PLAIN}]*)*"'
_SINGLE = rf"""'[^'"{_PLAIN}]*(?:\\[ntrbf\\"][^'"{_PLAIN}]*)*'"""
"""Texts that are the same in JSON, but for the quotes."""
_ROW = rf"\[{_GAP}(?:{_WORD}{_GAP}(?:,{_GAP}{_WORD}{_GAP})*)?\]"
_VALUE = rf"(?:({_DOUBLE}|{_SINGLE}|{_WORD}|{_ROW}){_GAP}(?:,|(?=[\])}}]))|([\[({{]))"
_ITEM = re.compile(rf"{_GAP}(){_VALUE}")
_PAIR = re.compile(rf"{_GAP}({_DOUBLE}|{_SINGLE}){_GAP}:{_GAP}{_VALUE}")
_ENDS = {closing: re.compile(rf"{_GAP}\{closing}{_GAP}(,?)") for closing in _CLOSING.values()}
_SAME_IN_JSON = re.compile(rf"""(?:[^'"{_PLAIN}]+|\\[ntrbf\\"])+""")
"""Inside a string."""


def read_python_call(stream: Stream, is_bare: bool) -> Steps[None]:
    """A call. is_bare: no marker has announced it, so its name must be a tool's. Raises `NotACall`."""
    yield from stream.space()
    name = yield from stream.word()
    if not name or (is_bare and name not in stream.tools) or not (yield from stream.accept("(")):
        raise NotACall
    stream.call(name)
    writer = ObjectWriter(stream)
    while True:
        yield from stream.space()
        if (yield from stream.accept(")")):
            writer.end()
            return
        key = yield from stream.word()
        yield from stream.space()
        if not key or not (yield from stream.accept("=")):
            raise NotACall
        writer.key(key)
        yield from _value(stream, 0)


def _value(stream: Stream, depth: int) -> Steps[None]:
    """A literal, and the comma behind it."""
    yield from stream.space()
    first = yield from stream.peek()
    if depth > MAX_DEPTH or not first:
        raise NotACall
    if first in _CLOSING:
        yield from stream.accept(first)
        yield from _container(stream, first, depth)
        return
    if first in "'\"":
        yield from _string(stream, first)
    else:
        word = yield from stream.word()
        if not (yield from stream.peek()):  # it may be cut
            raise NotACall
        stream.arguments(_scalar(word))
    yield from _comma(stream)


def _comma(stream: Stream) -> Steps[None]:
    yield from stream.space()
    yield from stream.accept(",")


def _container(stream: Stream, opening: str, depth: int) -> Steps[None]:
    """A list or a dictionary behind its bracket, and the comma behind it."""
    is_dict, closing = opening == "{", _CLOSING[opening]
    item, end = _PAIR if is_dict else _ITEM, _ENDS[closing]
    stream.arguments("{" if is_dict else "[")
    before = ""
    while True:
        if depth + 1 < MAX_DEPTH and (match := stream.at_once(item)):
            key, value, inner = match.groups()
            if key:
                before += f"{_simple(key)}: "
            stream.arguments(before + _simple(value) if value else before)
            before = ", "
            if inner:
                yield from _container(stream, inner, depth + 1)
            continue
        if match := stream.at_once(end):
            stream.arguments("}" if is_dict else "]")
            if not match[1]:
                yield from _comma(stream)
            return
        yield from stream.space()
        if (yield from stream.accept(closing)):
            stream.arguments("}" if is_dict else "]")
            yield from _comma(stream)
            return
        if not (yield from stream.peek()):
            raise NotACall
        stream.arguments(before)
        before = ", "
        if is_dict:
            quote = yield from stream.peek()
            if not quote or quote not in "'\"":
                raise NotACall
            yield from _string(stream, quote)
            yield from stream.space()
            if not (yield from stream.accept(":")):
                raise NotACall
            stream.arguments(": ")
        yield from _value(stream, depth + 1)


def _simple(text: str) -> str:
    """A text, a word, or a list of words, as JSON."""
    if text[0] in "'\"":
        return f'"{text[1:-1]}"'
    if text[0] == "[":
        words = text[1:-1].split(",") if text[1:-1].strip() else ()
        return f"[{', '.join(_scalar(word.strip()) for word in words)}]"
    return _scalar(text)


def _string(stream: Stream, quote: str) -> Steps[None]:
    """A string, which streams."""

    def emit(text: str) -> None:
        stream.arguments(dumps(text)[1:-1])

    yield from stream.accept(quote)
    stream.arguments('"')
    while True:
        if same := stream.at_once(_SAME_IN_JSON):
            stream.arguments(same[0])
        if (yield from stream.until(quote, "\\", emit=emit)) != "\\":
            break
        letter = yield from stream.peek()
        yield from stream.accept(letter)
        if letter in _NUM_DIGITS:
            stream.arguments((yield from _code_point(stream, _NUM_DIGITS[letter])))
        elif letter:
            emit(_ESCAPES.get(letter, letter if letter in "\\'\"" else f"\\{letter}"))
    if not (yield from stream.peek()):  # behind a string comes at least a parenthesis
        raise NotACall
    stream.arguments('"')


def _code_point(stream: Stream, num_digits: int) -> Steps[str]:
    """A character as JSON writes it. Half of a surrogate pair is written as it came: its other half may come
    next."""
    digits = ""
    while len(digits) < num_digits:
        digit = yield from stream.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise NotACall
        yield from stream.accept(digit)
        digits += digit
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"
    return dumps(chr(code) if code <= 0x10FFFF else "\ufffd")[1:-1]


def _scalar(word: str) -> str:
    """A constant or a number, with the digits that were written; any other word is a text."""
    parts = _NUMBER.fullmatch(word)
    if not word:
        raise NotACall
    if word in _WORDS or parts is None or not parts[2] + parts[4]:
        return _WORDS.get(word) or dumps(word)
    sign, whole, point, fraction, exponent = parts.groups("")
    digits = whole.replace("_", "").lstrip("0") or "0"
    fraction = fraction.replace("_", "") or "0"
    return f"{sign}{digits}{point and point + fraction}{exponent}"


def keywords_format(schema: Any) -> dict[str, Any]:
    """The xgrammar format of keyword arguments in the order of the schema, with values in JSON, which
    `read_python_call` reads too. True: any. Raises `ValueError` for a schema without properties, and for a
    name that is no identifier."""
    if schema is True:
        name = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
        one = [name, _const("="), {"type": "json_schema", "json_schema": True, "max_whitespace_cnt": 1}]
        more = {"type": "star", "content": _sequence([_const(", "), *one])}
        return {"type": "optional", "content": _sequence([*one, more])}
    if not set(schema) <= KEYWORDS | ANNOTATIONS:
        raise ValueError("#: arguments in Python need a schema of properties, without keywords beside them")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    more = schema.get("additionalProperties", True)
    names = sorted({**properties, **dict.fromkeys(required)}, key=lambda name: name not in required)
    arguments = []
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"#/properties/{name}: an argument in Python has an identifier for a name")
        value = properties.get(name, more)
        form = json_format({"allOf": [value]} if isinstance(value, bool) else value, schema)
        arguments.append((name in required, _sequence([_const(f"{name}="), form])))
    return _list_of(arguments)


def _list_of(arguments: list[tuple[bool, dict[str, Any]]]) -> dict[str, Any]:
    """Those that are required come first."""
    lists = []
    for first, (is_required, form) in enumerate(arguments):
        rest = [_sequence([_const(", "), each]) for _, each in arguments[first + 1 :]]
        others = [
            each if needed else {"type": "optional", "content": each}
            for each, (needed, _) in zip(rest, arguments[first + 1 :])
        ]
        lists.append(_sequence([form, *others]))
        if is_required:
            return lists[0]
    return {"type": "or", "elements": [_const(""), *lists]}


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
