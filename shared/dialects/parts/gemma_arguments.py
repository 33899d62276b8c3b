"""Gemma 4's arguments, written, read and as a grammar: bare keys in sorted order, texts between `<|"|>`.

xgrammar's own style for them spells the quotes out, which a model writes as tokens. A value whose form the
schema leaves open is JSON, which the dialect reads too.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
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
from diptych.shared.text.control_text import CONTROLS

END, QUOTE = "<tool_call|>", '<|"|>'
MAX_DEPTH = 64
_CLOSING = {"{": "}", "[": "]"}
_GAP, _WORD, _KEY = r"\s{0,64}", r"[\w.+-]{1,64}", rf'\w{{1,64}}|"[^"\\\x00-\x1f{CONTROLS}]{{0,64}}"'
_JSON_TEXT = rf'"[^"\\{CONTROLS}]*(?:\\[^{CONTROLS}][^"\\{CONTROLS}]*)*"'
_ROW = rf"\[{_GAP}(?:{_WORD}{_GAP}(?:,{_GAP}{_WORD}{_GAP})*)?\]"
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


def read_container(stream: Stream, opening: str, depth: int = 0) -> Steps[str]:
    """An object or a list behind its bracket, given out as JSON. Returns what it took beyond: a comma, the
    end marker, or nothing."""
    closing, quote, before, found = _CLOSING[opening], stream.as_read(QUOTE), opening, ""
    item, end = _patterns(quote, closing)
    while found not in (closing, END):
        if depth < MAX_DEPTH and (match := stream.at_once(item)):
            key, value, inner = match.groups()
            if key:
                before += f"{key}: " if key[0] == '"' else f'"{key}": '
            stream.arguments(before + _simple(value, quote) if value else before)
            before = ", "
            if inner:
                found = yield from read_container(stream, inner, depth + 1)
                found = found or (yield from stream.until(",", closing, END)) or END
            continue
        if depth and (match := stream.at_once(end)):
            stream.arguments(closing if before == ", " else opening + closing)
            return match[1]
        yield from stream.space()
        if (yield from stream.accept(closing)):
            break
        key_text = (yield from _read_key(stream)) if opening == "{" else ""
        if key_text is None:
            return END
        stream.arguments(f"{before}{dumps(key_text)}: " if opening == "{" else before)
        before = ", "
        found = (yield from _read_value(stream, depth)) or (yield from stream.until(",", closing, END)) or END
    if found == END:
        return END
    stream.arguments(closing if before == ", " else opening + closing)
    return ""


def _read_key(stream: Stream) -> Steps[str | None]:
    """A key, and the colon behind it. None: the answer ends within."""
    if (yield from stream.accept(QUOTE)):
        key = yield from stream.head(QUOTE)
    elif (yield from stream.peek()) == '"':  # JSON
        parts: list[str] = []
        if not (yield from stream.json(parts.append)):
            return None
        try:
            key = str(json.loads("".join(parts), strict=False))
        except ValueError:
            key = "".join(parts).strip('"')
    else:
        return (yield from stream.head(":"))
    yield from stream.until(":")
    return key


def _read_value(stream: Stream, depth: int) -> Steps[str]:
    """A value, given out as JSON. Returns what it took beyond: a character, the end marker, or nothing."""
    yield from stream.space()
    if depth > MAX_DEPTH:
        raise NotACall
    if (yield from stream.accept(QUOTE)):
        yield from read_text(stream, QUOTE)
    elif (yield from stream.peek()) == '"':  # JSON
        yield from stream.json(stream.arguments)
    elif (yield from stream.accept("{")):
        return (yield from read_container(stream, "{", depth + 1))
    elif (yield from stream.accept("[")):
        return (yield from read_container(stream, "[", depth + 1))
    else:
        parts: list[str] = []
        found = yield from stream.until(",", "}", "]", END, emit=parts.append)
        if found:
            stream.arguments(as_json("".join(parts).strip(), frozenset()))
        return found or END
    return ""


@lru_cache(8)
def _patterns(quote: str, closing: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What most containers consist of is read as the rest is, only faster: an item up to its comma or to the
    bracket behind it, or up to the bracket with which it begins; and the closing bracket. quote: as it stands
    in the text."""
    text = rf"{re.escape(quote)}[^{quote[0]}{CONTROLS}]{{0,256}}{re.escape(quote)}|{_JSON_TEXT}"
    key = rf"({_KEY}){_GAP}:{_GAP}" if closing == "}" else "()"
    end = rf"{_GAP}(?:,|(?=\{closing}))"
    return (
        re.compile(rf"{_GAP}{key}(?:({text}|{_WORD}|{_ROW}){end}|([{{\[]))"),
        re.compile(rf"{_GAP}\{closing}{_GAP}(,?)"),
    )


def _simple(text: str, quote: str) -> str:
    """A text, a word, or a list of words, as JSON."""
    if text[0] == quote[0]:
        return dumps(text[len(quote) : -len(quote)])
    if text[0] == '"':
        return text
    if text[0] == "[":
        words = text[1:-1].split(",") if text[1:-1].strip() else ()
        return f"[{', '.join(as_json(word.strip(), frozenset()) for word in words)}]"
    return as_json(text, frozenset())


def written(value: Any) -> str:
    """As chat templates write a value."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{written(value[key])}' for key in sorted(value, key=str.lower))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return dumps(value)
