"""One schema for each keyword of JSON Schema, in which an answer that ignores it is soon invalid."""

from __future__ import annotations

from typing import Any

JSON = dict[str, Any]
INTEGERS = {"type": "integer", "minimum": 0, "maximum": 99}
LETTERS = {"type": "string", "pattern": "^[ab]{1,4}$"}


def closed(required: list[str], **properties: Any) -> JSON:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


KEYWORDS: dict[str, Any] = {
    "type": {"type": "boolean"},
    "type of several": {"type": ["integer", "null"]},
    "enum": {"enum": ["red", 7, None, {"a": [1]}]},
    "enum with type": {"type": "string", "enum": ["a", 1, "b", 2]},
    "const": closed(["x"], x={"const": "123"}),
    "minimum, maximum": INTEGERS,
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "multipleOf": {"type": "integer", "minimum": 0, "maximum": 98, "multipleOf": 7},
    "minLength, maxLength": {"type": "string", "minLength": 2, "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[0-9]{2}-[a-c]$"},
    "pattern with a quote": {"type": "string", "pattern": '^"[ab]$'},
    "pattern with length": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    "format date": {"type": "string", "format": "date"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "format uuid": {"type": "string", "format": "uuid"},
    "items": {"type": "array", "items": INTEGERS, "maxItems": 3},
    "minItems, maxItems": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"const": "a"}, INTEGERS],
        "items": False,
        "minItems": 2,
    },
    "uniqueItems": {
        "type": "array",
        "items": {"enum": [1, 2, 3]},
        "minItems": 3,
        "maxItems": 3,
        "uniqueItems": True,
    },
    "contains": {
        "type": "array",
        "items": {"enum": [1, 2, 3]},
        "minItems": 1,
        "maxItems": 1,
        "contains": {"const": 2},
    },
    "required": closed(["a", "b"], a=INTEGERS, b=INTEGERS, c=INTEGERS),
    "required, undeclared": {
        "type": "object",
        "required": ["a"],
        "additionalProperties": INTEGERS,
        "maxProperties": 2,
    },
    "additionalProperties": closed([], a={"const": 1}),
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": INTEGERS},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "propertyNames": {
        "type": "object",
        "propertyNames": LETTERS,
        "additionalProperties": INTEGERS,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "dependentRequired": {
        **closed(["a"], a=INTEGERS, b=INTEGERS, c=INTEGERS, d=INTEGERS),
        "dependentRequired": {"a": ["b", "c", "d"]},
    },
    "anyOf": {"anyOf": [{"const": "yes"}, INTEGERS]},
    "anyOf with a sibling": {
        "type": "integer",
        "minimum": 50,
        "maximum": 99,
        "anyOf": [{"maximum": 60}, {"minimum": 90}],
    },
    "oneOf": {
        "oneOf": [
            {"type": "integer", "minimum": 0, "maximum": 5},
            {"type": "integer", "minimum": 3, "maximum": 9},
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    "not": {"enum": [1, 2, 3, 4, 5, 6], "not": {"enum": [1, 2, 3, 4]}},
    "if, then": {
        **closed(["k", "v"], k={"enum": ["i"]}, v={"enum": [1, "one"]}),
        "if": {"properties": {"k": {"const": "i"}}},
        "then": {"properties": {"v": {"type": "integer"}}},
    },
    "$ref": {"$defs": {"n": INTEGERS}, **closed(["a"], a={"$ref": "#/$defs/n"})},
    "$ref with a sibling": {
        "$defs": {"n": {"type": "integer"}},
        "$ref": "#/$defs/n",
        "minimum": 5,
        "maximum": 9,
    },
    "recursion": {
        "$defs": {
            "n": closed(
                ["v", "n"], v={"enum": [1, 2]}, n={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}
            )
        },
        "$ref": "#/$defs/n",
    },
}
