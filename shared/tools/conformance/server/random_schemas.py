"""Random JSON schemas from a seed: any keywords in any combination."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = [
    "^[a-c]+$",
    "b",
    "^a|b$",
    r"\d",
    '^"$',
    "a\nb",
    r"^\\$",
    "^(ab)?c*$",
    "^-?[0-9]{1,3}(\\.[0-9]+)?$",
    r"^\S\W$",
]
NAMES = "abc"


def schema(rng: random.Random, depth: int = 3) -> Any:
    """Any keywords in any combination, most of them for one type."""
    kinds = ["string", "integer", "number", "enum", "boolean", "ref"]
    kind = rng.choice(kinds + (["object", "array", "anyOf", "oneOf", "allOf"] * 2 if depth else []))
    found: dict[str, Any] = {"type": kind}
    if kind == "string":
        found |= some(
            rng, minLength=rng.randint(0, 3), maxLength=rng.randint(0, 5), pattern=rng.choice(PATTERNS)
        )
        found |= some(rng, 0.1, format=rng.choice(["date", "date-time", "ipv4", "uuid", "unknown", "regex"]))
    elif kind in ("integer", "number"):
        found |= some(rng, minimum=rng.randint(-9, 9), maximum=rng.choice([3, 2.5, 17, 120]))
        found |= some(
            rng,
            0.2,
            exclusiveMinimum=rng.choice([0, -1.25]),
            exclusiveMaximum=5,
            multipleOf=rng.choice([1, 3, 0.5]),
        )
    elif kind == "enum":
        found = {"enum": rng.sample([1, 2.5, "a", "bcd", None, True, 0, [1], {"a": 1}, '"\\'], 4)}
        found |= some(rng, 0.2, type=["string", "integer"], maxLength=2, minimum=1, pattern="a")
    elif kind == "ref":
        found = {"$ref": rng.choice(["#", "#/$defs/x", "#/$defs/y", "#z"])} | some(
            rng, 0.2, maxLength=3, required=["a"]
        )
    elif kind == "object":
        found |= _object(rng, depth)
    elif kind == "array":
        found |= some(
            rng, minItems=rng.randint(0, 2), maxItems=rng.randint(0, 3), items=schema(rng, depth - 1)
        )
        found |= some(rng, 0.3, prefixItems=[schema(rng, depth - 1) for _ in range(2)])
        found |= some(rng, 0.05, uniqueItems=True, contains={"type": "string"}, unevaluatedItems=False)
    elif kind != "boolean":
        found = {kind: [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        found |= some(rng, 0.2, type=rng.choice(["object", "string"]), **_object(rng, depth))
    if rng.random() < 0.02:
        refused: dict[str, Any] = {"not": {"type": "null"}, "if": True, "dependentRequired": {"a": ["b"]}}
        found |= some(rng, **refused)
    if rng.random() < 0.1:
        found.pop("type", None)
    return found


def document(rng: random.Random) -> Any:
    found = schema(rng)
    definitions = {"x": schema(rng, 1), "y": schema(rng, 2), "z": {"$anchor": "z", **schema(rng, 0)}}
    return {**found, "$defs": definitions}


def some(rng: random.Random, share: float = 0.4, **keywords: Any) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if rng.random() < share}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    properties = {name: schema(rng, depth - 1) for name in NAMES if rng.random() < 0.5}
    found = some(rng, 0.8, properties=properties)
    extra = rng.choice([True, False, {"type": "integer"}])
    found |= some(rng, required=rng.sample(NAMES, rng.randint(0, 2)), additionalProperties=extra)
    found |= some(rng, 0.15, minProperties=rng.randint(0, 2), maxProperties=rng.randint(0, 3))
    found |= some(rng, 0.08, patternProperties={rng.choice(PATTERNS): schema(rng, 0)})
    found |= some(rng, 0.08, propertyNames={"pattern": rng.choice(PATTERNS)}, unevaluatedProperties=False)
    return found
