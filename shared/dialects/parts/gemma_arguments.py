"""Gemma 4's arguments, written, read and as a grammar: bare keys in sorted order, texts between `<|"|>`.

xgrammar's own style for them spells the quotes out, which a model writes as tokens. A value whose form the
schema leaves open is JSON, which the dialect reads too.
"""

from __future__ import annotations

import json
import re
from typing import Any

from diptych.shared.dialects.parts.json_calls import dumps, json_object
from diptych.shared.dialects.parts.tags import Format
from diptych.shared.dialects.parts.typed_values import as_json, read_text
from diptych.shared.dialects.parts.xml_arguments import (
    BESIDE,
    TEXT_LIMITS,
    Tags,
    const_format,
    declared,
    followed,
    json_format,
    text_format,
)
from diptych.shared.grammar.schema_read import ANNOTATIONS
from diptych.shared.interfaces.dialect import NotACall, Steps, Stream

END, QUOTE = "<tool_call|>", '<|"|>'
MAX_DEPTH = 64
_GAP, _WORD = r"\s{0,64}", r"[\w.+-]{1,64}"
_ROW = rf"\[{_GAP}(?:{_WORD}{_GAP}(?:,{_GAP}{_WORD}{_GAP})*)?\]"
_VALUE = rf"{_GAP}({_WORD}|{_ROW}){_GAP}(?:,|(?=[\]}}]))"
_ITEM, _PAIR = re.compile(_VALUE), re.compile(rf"{_GAP}(\w{{1,64}}){_GAP}:{_VALUE}")
"""What most lists and objects consist of: these are read as others are, only faster."""
_QUOTED = Tags(lambda name, is_text: QUOTE, QUOTE, QUOTE)


def gemma_object(schema: Any, root: Any = None, refs: frozenset[str] = frozenset("#")) -> Format:
    """An object, braces included. True: any. refs: that lead here. Raises `ValueError` as `xml_arguments`."""
    if schema is True:
        return json_object(True)
    root = schema if root is None else root
    schema = followed(schema, root)
    if not schema.get("properties"):
        return json_format(schema, root)
    properties, required = declared(schema)
    rest: dict[bool, Format] = {
        True: const_format("}"),
        False: const_format("}"),
    }  # is the next one the first?
    for name in sorted(properties, key=str.lower, reverse=True):
        value = _value(properties[name], root, f"#/properties/{name}", refs)
        given = {
            is_first: _sequence(const_format(f"{'' if is_first else ','}{name}:"), value, rest[False])
            for is_first in rest
        }
        rest = given if name in required else {k: _either(given[k], rest[k]) for k in rest}
    return _sequence(const_format("{"), rest[True])


def _value(schema: Any, root: Any, path: str, refs: frozenset[str]) -> Format:
    """A schema that contains itself is JSON from the second time on."""
    ref = schema.get("$ref") if isinstance(schema, dict) else None
    if ref is not None and ref in refs:
        return json_format(schema, root)
    schema = followed(schema, root, path)
    keywords = schema.keys() - ANNOTATIONS
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None and all(isinstance(each, str) and QUOTE not in each for each in values):
        if keywords - {"enum", "const", "type"} or len(keywords & {"enum", "const"}) > 1:
            raise ValueError(f"{path}/enum {BESIDE}")
        return _either(*(const_format(f"{QUOTE}{each}{QUOTE}") for each in values))
    if schema.get("type") == "string" and not keywords - {"type", *TEXT_LIMITS}:
        return _sequence(const_format(QUOTE), text_format(_QUOTED, schema, path), const_format(QUOTE))
    if schema.get("type") == "object" and schema.get("properties"):
        return gemma_object(schema, root, refs | {str(ref)})
    return json_format(schema, root)


def _sequence(*parts: Format) -> Format:
    return {"type": "sequence", "elements": list(parts)}


def _either(*branches: Format) -> Format:
    return branches[0] if len(branches) == 1 else {"type": "or", "elements": list(branches)}


def _read_value(stream: Stream, depth: int) -> Steps[str]:
    """A value, given out as JSON. Returns the character behind it that it took, or ""."""
    yield from stream.space()
    if depth > MAX_DEPTH:
        raise NotACall
    if (yield from stream.accept(QUOTE)):
        yield from read_text(stream, QUOTE)
    elif (yield from stream.peek()) == '"':  # JSON
        yield from stream.json(stream.arguments)
    elif (yield from stream.accept("{")):
        yield from read_object(stream, depth + 1)
    elif (yield from stream.accept("[")):
        yield from _list(stream, depth + 1)
    else:
        parts: list[str] = []
        found = yield from stream.until(",", "}", "]", END, emit=parts.append)
        if found:
            stream.arguments(as_json("".join(parts).strip(), frozenset()))
        return found or END
    return ""


def read_object(stream: Stream, depth: int = 0) -> Steps[None]:
    """An object behind its brace, given out as JSON."""
    before, found = "{", ""
    while found not in ("}", END):
        while depth < MAX_DEPTH and (pair := stream.at_once(_PAIR)):
            stream.arguments(f"{before}{dumps(pair[1])}: {_simple(pair[2])}")
            before = ", "
        yield from stream.space()
        if (yield from stream.accept("}")):
            break
        if (yield from stream.accept(QUOTE)):
            key = yield from stream.head(QUOTE)
            yield from stream.until(":")
        elif (yield from stream.peek()) == '"':  # JSON
            parts: list[str] = []
            if not (yield from stream.json(parts.append)):
                return
            key = _key("".join(parts))
            yield from stream.until(":")
        else:
            key = yield from stream.head(":")
        stream.arguments(f"{before}{dumps(key)}: ")
        before = ", "
        found = (yield from _read_value(stream, depth)) or (yield from stream.until(",", "}", END)) or END
    if found != END:
        stream.arguments("}" if before == ", " else "{}")


def _simple(text: str) -> str:
    """A word, or a list of words, as JSON."""
    if text[0] != "[":
        return as_json(text, frozenset())
    words = text[1:-1].split(",") if text[1:-1].strip() else ()
    return f"[{', '.join(as_json(word.strip(), frozenset()) for word in words)}]"


def _key(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text.strip('"')


def _list(stream: Stream, depth: int) -> Steps[None]:
    """Behind its bracket."""
    before, found = "[", ""
    while found not in ("]", END):
        while depth < MAX_DEPTH and (item := stream.at_once(_ITEM)):
            stream.arguments(before + _simple(item[1]))
            before = ", "
        yield from stream.space()
        if (yield from stream.accept("]")):
            break
        stream.arguments(before)
        before = ", "
        found = (yield from _read_value(stream, depth)) or (yield from stream.until(",", "]", END)) or END
    if found != END:
        stream.arguments("]" if before == ", " else "[]")


def written(value: Any) -> str:
    """As chat templates write a value."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{written(value[key])}' for key in sorted(value, key=str.lower))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return dumps(value)
