"""The grammar of arguments that stand between tags, for families that write them so.

xgrammar's own formats of this kind let white space into texts and take a pattern for one of JSON. Here each
argument is a format of its own: a text raw, any other value as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from diptych.shared.dialects.parts.typed_values import target_of
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
    for keyword in ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "minProperties"):
        if keyword in schema:
            raise ValueError(f"#/{keyword} is not supported for arguments between tags: declare properties")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    elements = []
    for name in [*properties, *(name for name in required if name not in properties)]:
        argument = _argument(name, properties.get(name, True), root, tags)
        elements.append(argument if name in required else {"type": "optional", "content": argument})
    return {"type": "sequence", "elements": elements} if elements else const_format("")


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
    schema = followed(schema, root)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            siblings = {key: value for key, value in schema.items() if key != keyword}
            branches = [{**siblings, **followed(each, root)} for each in schema[keyword]]
            return [value for branch in branches for value in _values(path, branch, root, tags)]
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [v for kind in kinds for v in _values(path, {**schema, "type": kind}, root, tags)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None and kinds in (None, "string"):
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str) and kinds is None]
        found = [(True, {"type": "or", "elements": list(map(const_format, texts))})] if texts else []
        return [*found, *([(False, json_format({"enum": others}, root))] if others else [])]
    if kinds == "string" or (kinds is None and not {"allOf", "not", "if"} & schema.keys()):
        return [(True, text_format(tags, schema, path))]
    return [(False, json_format(schema, root))]


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


def json_format(schema: dict[str, Any], root: Any) -> Format:
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {"type": "json_schema", "json_schema": {**definitions, **schema}, "max_whitespace_cnt": 1}


def followed(schema: Any, root: Any) -> dict[str, Any]:
    """The schema that references lead to, with the keywords beside them."""
    for _ in range(16):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        target = root if schema["$ref"] == "#" else target_of(root, schema["$ref"])
        schema = {**target, **siblings} if isinstance(target, dict) else siblings
    return schema if isinstance(schema, dict) else {}


def const_format(text: str) -> Format:
    return {"type": "const_string", "value": text}
