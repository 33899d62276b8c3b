"""The grammar of arguments that stand between tags, for families that write them so.

xgrammar's own formats of this kind let white space into texts and take a pattern for one of JSON. Here each
argument is a format of its own: a text raw, any other value as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from diptych.shared.dialects.parts.typed_values import target_of
from diptych.shared.grammar.schema_read import ANNOTATIONS
from diptych.shared.grammar.schema_regex import search_match

Format = dict[str, Any]

TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength")
FORMATS = {
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "email": r"^[a-z0-9._+-]{1,64}@[a-z0-9-]{1,63}(\.[a-z]{2,20}){1,3}$",
    "uri": r"^https?://[A-Za-z0-9.-]+(:[0-9]+)?(/[A-Za-z0-9._~%?&=#/-]*)?$",
    "date": r"^[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}
"""Formats of texts -> a regex of texts that all have it."""
REFUSED = "is not supported for a text between tags: use a pattern"
BESIDE = "is not supported beside other keywords for arguments between tags"
OF_OBJECT = frozenset(["type", "properties", "required", "additionalProperties", "unevaluatedProperties"])
NAME = re.compile(r"[^<>\"'=\s]+")
DEFINITIONS = ("$defs", "definitions")
ROOT = "arguments"
"""Definition of the whole schema in the schema of one value."""


class Tags(NamedTuple):
    """How an argument is written. begin: from its name, and whether it is a text."""

    begin: Callable[[str, bool], str]
    end: str
    end_marker: str  # in `end`: no text holds it


def xml_arguments(schema: Any, tags: Tags) -> Format:
    """All arguments, in the order of the schema. True: any. Raises `ValueError` with the path of a keyword
    that cannot be honoured."""
    if schema is True:
        any_name = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
        before, _, behind = tags.begin("\0", True).partition("\0")
        parts = [
            const_format(before),
            any_name,
            const_format(behind),
            text_format(tags),
            const_format(tags.end),
        ]
        return {"type": "star", "content": {"type": "sequence", "elements": parts}}
    root, schema = schema, followed(schema, schema)
    properties, required = declared(schema)
    elements = []
    for name, value in properties.items():
        argument = _argument(name, value, root, tags)
        elements.append(argument if name in required else {"type": "optional", "content": argument})
    return {"type": "sequence", "elements": elements} if elements else const_format("")


def declared(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schemas of the arguments that may be given, and the names of those that must be. Raises
    `ValueError` with the path of any other keyword, and for a name that no tag can hold."""
    for keyword in schema.keys() - OF_OBJECT - ANNOTATIONS:
        raise ValueError(f"#/{keyword} is not supported for arguments between tags: declare properties")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    more = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    found = {**properties, **{name: more for name in required if name not in properties}}
    for name, value in found.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"#/properties/{name}: an argument of this name cannot stand between tags")
        if value is False and name in required:
            raise ValueError(f"#/required: {name!r} is required, and no value is allowed")
    return {name: value for name, value in found.items() if value is not False}, required


def _argument(name: str, schema: Any, root: Any, tags: Tags) -> Format:
    branches = [
        {
            "type": "sequence",
            "elements": [const_format(tags.begin(name, is_text)), value, const_format(tags.end)],
        }
        for is_text, value in _values(f"#/properties/{name}", schema, root, tags)
    ]
    return branches[0] if len(branches) == 1 else {"type": "or", "elements": branches}


def _values(path: str, schema: Any, root: Any, tags: Tags) -> list[tuple[bool, Format]]:
    """Forms of a value: whether it is a text, and its format."""
    schema = followed(schema, root, path)
    keywords = schema.keys() - ANNOTATIONS
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            if keywords != {keyword}:
                raise ValueError(f"{path}/{keyword} {BESIDE}")
            return _branches(path, keyword, schema[keyword], root, tags)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [v for kind in kinds for v in _values(path, {**schema, "type": kind}, root, tags)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if kinds not in (None, "string"):
        return [(False, json_format(schema, root, tags.end_marker))]
    for keyword in keywords & {"allOf", "not", "if", "enum", "const"}:
        if keywords - {keyword, "type"}:
            raise ValueError(f"{path}/{keyword} {BESIDE}")
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str) and kinds is None]
        if any(tags.end_marker in text for text in texts):
            raise ValueError(f"{path}/enum: a text with {tags.end_marker!r} cannot stand between tags")
        found = [(True, {"type": "or", "elements": list(map(const_format, texts))})] if texts else []
        return [*found, *([(False, json_format({"enum": others}, root, tags.end_marker))] if others else [])]
    for keyword in keywords - {"type", *TEXT_LIMITS}:
        if kinds is None or keyword in ("allOf", "not", "if"):
            raise ValueError(f"{path}/{keyword} {BESIDE}: state the type")
    return [(True, text_format(tags, schema, path))]


def _branches(
    path: str, keyword: str, branches: list[Any], root: Any, tags: Tags
) -> list[tuple[bool, Format]]:
    """The texts that one of the branches allows, and its other values as JSON."""
    each = [(branch, _values(path, branch, root, tags)) for branch in branches]
    texts = [value for _, values in each for value in values if value[0]]
    plain = [branch for branch, values in each if all(not is_text for is_text, _ in values)]
    mixed = [value for _, values in each for value in values if len(values) > 1 and not value[0]]
    if keyword == "oneOf" and (len(texts) > 1 or mixed):
        raise ValueError(f"{path}/oneOf: branches may overlap: use anyOf")
    rest = [(False, json_format({keyword: plain}, root, tags.end_marker))] if plain else []
    return [*texts, *mixed, *rest]


def text_format(tags: Tags, schema: Any = None, path: str = "") -> Format:
    limits = {key: schema[key] for key in TEXT_LIMITS if key in (schema or {})}
    if not limits:
        return {"type": "any_text", "excludes": [tags.end_marker]}
    if "format" in limits and limits["format"] not in FORMATS:
        raise ValueError(f"{path}/format: {limits['format']!r} {REFUSED}")
    pattern = limits.get("pattern", FORMATS.get(limits.get("format", "")))
    if pattern is None:
        most = limits.get("maxLength", "")
        return {"type": "regex", "pattern": f"[^<]{{{limits.get('minLength', 0)},{most}}}"}
    if len(limits) > 1:
        raise ValueError(f"{path}: {' and '.join(limits)} together: state them in one pattern")
    branches = [{"type": "regex", "pattern": text} for text in search_match(pattern)]
    return branches[0] if len(branches) == 1 else {"type": "or", "elements": branches}


def json_format(schema: dict[str, Any], root: Any, end_marker: str = "") -> Format:
    """A value in JSON. Its references to places of `root` stay valid."""
    definitions = {key: _moved(root[key]) for key in DEFINITIONS if key in root}
    moved = _moved({key: value for key, value in schema.items() if key not in definitions})
    if f'"#/$defs/{ROOT}' in json.dumps([moved, definitions]):
        whole = _moved({key: value for key, value in root.items() if key not in definitions})
        definitions["$defs"] = {**definitions.get("$defs", {}), ROOT: whole}
    if end_marker and end_marker in json.dumps([moved, definitions], ensure_ascii=False):
        raise ValueError(f"a schema with {end_marker!r} is not supported for arguments between tags")
    return {"type": "json_schema", "json_schema": {**definitions, **moved}, "max_whitespace_cnt": 1}


def _moved(schema: Any) -> Any:
    """References to the root lead to a definition of it."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    ref = schema.get("$ref")
    if isinstance(ref, str) and (
        ref == "#" or (ref.startswith("#/") and ref.split("/")[1] not in DEFINITIONS)
    ):
        schema = {**schema, "$ref": f"#/$defs/{ROOT}{ref[1:]}"}
    return {key: _moved(value) for key, value in schema.items()}


def followed(schema: Any, root: Any, path: str = "#") -> dict[str, Any]:
    """The schema that references lead to. Raises `ValueError` for keywords beside one, and for one that leads
    nowhere."""
    for _ in range(16):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        if schema.keys() - ANNOTATIONS != {"$ref"}:
            raise ValueError(f"{path}/$ref {BESIDE}")
        ref = schema["$ref"]
        schema = target_of(root, ref) if ref == "#" or ref.startswith("#/") else None
        if not isinstance(schema, (dict, bool)):
            raise ValueError(f"{path}/$ref: {ref!r} names no place of the schema")
    return schema if isinstance(schema, dict) else {}


def const_format(text: str) -> Format:
    return {"type": "const_string", "value": text}
