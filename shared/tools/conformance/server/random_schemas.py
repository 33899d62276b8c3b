"""Random JSON schemas from a seed: any keywords in any combination."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
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
NAMES = ["a", "b", "c", 'q"t', "b\\s", "", "é😀", "n\nl", "a/b", "$ref", "</parameter>"]
VALUES: list[Any] = [
    1, 2.5, "a", "bcd", None, True, 0, [1], {"a": 1}, '"\\', -0.0, 1e-7, 0.1, 5e-324, "\u2028",
    "\x01", "\x7f", "😀", {'k"': "\n"}, [[], {"b": [True, 2.5]}], "</tool_call>",
]  # fmt: skip
FORMATS = [
    "date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "uri-reference", "json-pointer", "unknown", "regex",
]  # fmt: skip
ATOMS = [
    "a", "b", "[a-c]", r"\d", r"\w", ".", "[^a]", '[^"]', '"', r"\\", r"\n", r"\s", r"\S", r"\W", r"\D",
    "é", "[é]", "[^é]", r"\x41", r"\-", "/", r"[\w-]", r"[a\]]", r"[^\d]", r"[\x00-\x1f]", "{", r"\b",
    "(?=a)", "(?i:a)", "a++", "[]a]", "a{2,1}",
]  # fmt: skip
"""Of random patterns; the last ones are refused."""
REPEATS = ["*", "+", "?", "{2}", "{0,2}", "{1,}", "{0}", "+?"]


def schema(rng: random.Random, depth: int = 3) -> Any:
    """Any keywords in any combination, most of them for one type."""
    kinds = ["string", "integer", "number", "enum", "boolean", "ref"]
    kind = rng.choice(kinds + (["object", "array", "anyOf", "oneOf", "allOf"] * 2 if depth else []))
    found: dict[str, Any] = {"type": kind}
    if kind == "string":
        found |= some(rng, minLength=rng.randint(0, 3), maxLength=rng.randint(0, 5), pattern=pattern(rng))
        found |= some(rng, 0.1, format=rng.choice(FORMATS))
    elif kind in ("integer", "number"):
        found |= some(
            rng, minimum=rng.choice([-9, 0, 2.5, -1e-6, 999.0]), maximum=rng.choice([3, 2.5, 17, 1e-6])
        )
        found |= some(
            rng,
            0.2,
            exclusiveMinimum=rng.choice([0, -1.25]),
            exclusiveMaximum=rng.choice([5, 1e-6]),
            multipleOf=rng.choice([1, 3, 0.5]),
        )
    elif kind == "enum":
        found = {"enum": rng.sample(VALUES, 4)}
        found |= some(rng, 0.2, type=["string", "integer"], maxLength=2, minimum=1, pattern="a", format="uri")
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


def pattern(rng: random.Random, depth: int = 3) -> str:
    """A listed one, or any atoms in any combination."""
    kind = rng.randint(0, 7)
    if depth == 0 or kind < 3:
        return rng.choice(ATOMS if depth < 3 else PATTERNS)
    parts = pattern(rng, depth - 1), pattern(rng, depth - 1)
    if kind < 5:
        return "".join(parts)
    if kind == 5:
        return f"{rng.choice(['^', ''])}({'|'.join(parts)}){rng.choice(['$', ''])}"
    return f"(?:{parts[0]}){rng.choice(REPEATS)}" if kind == 6 else "|".join(parts)


def document(rng: random.Random) -> Any:
    found = schema(rng)
    definitions = {"x": schema(rng, 1), "y": schema(rng, 2), "z": {"$anchor": "z", **schema(rng, 0)}}
    return {**found, "$defs": definitions}


def has_meaning(document: Any) -> bool:
    """Whether a validator can judge values by it: Python compiles its patterns, and no reference leads back
    to itself without a property or an item between, as in {"anyOf": [{"$ref": "#"}]}."""
    found = document["$defs"]
    root = {name: value for name, value in document.items() if name != "$defs"}
    targets = {"#": root, "#/$defs/x": found["x"], "#/$defs/y": found["y"], "#z": found["z"]}
    used = {"#"}
    after = {name: {each["$ref"] for each in in_place(target)} for name, target in targets.items()}
    for _ in targets:  # paths of any length
        used |= {
            each["$ref"] for name in used for each in parts(targets[name]) if str(each.get("$ref")) in targets
        }
        after = {name: direct.union(*(after[each] for each in direct)) for name, direct in after.items()}
    try:
        for each in (part for name in used for part in parts(targets[name])):
            for text in (each.get("pattern"), *each.get("patternProperties", ())):
                re.compile(text if isinstance(text, str) else "")
    except (re.error, RecursionError):
        return False
    return not any(name in after[name] for name in used)


def in_place(found: Any) -> Iterator[dict[str, Any]]:
    """The parts with a reference that judge the same value as the schema."""
    if isinstance(found, dict):
        if "$ref" in found:
            yield found
        for name in ("allOf", "anyOf", "oneOf"):
            for each in found.get(name, ()):
                yield from in_place(each)


def parts(found: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema."""
    if isinstance(found, dict):
        yield found
    for each in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from parts(each)


def some(rng: random.Random, share: float = 0.4, **keywords: Any) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if rng.random() < share}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    properties = {
        name: schema(rng, depth - 1) for name in NAMES if rng.random() < (0.5 if name in "abc" else 0.05)
    }
    found = some(rng, 0.8, properties=properties)
    extra = rng.choice([True, False, {"type": "integer"}])
    found |= some(rng, required=rng.sample(NAMES[:4], rng.randint(0, 2)), additionalProperties=extra)
    found |= some(rng, 0.15, minProperties=rng.randint(0, 2), maxProperties=rng.randint(0, 3))
    found |= some(rng, 0.08, patternProperties={pattern(rng): schema(rng, 0)})
    found |= some(rng, 0.08, propertyNames={"pattern": pattern(rng)}, unevaluatedProperties=False)
    return found
