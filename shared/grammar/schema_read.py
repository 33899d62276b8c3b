"""What stands in one JSON schema, and both of two schemas merged.

A `Place` is a schema and its JSON path. A conjunction is several of them that all hold. A `Shape` is one
alternative of a conjunction: keywords that all hold, whose own children are conjunctions.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
LARGEST = frozenset({"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"})
SMALLEST = frozenset({"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"})
REFUSED = {
    "not": "state what is allowed",
    "if": "state the cases with anyOf",
    "then": "state the cases with anyOf",
    "else": "state the cases with anyOf",
    "contains": "use items or prefixItems",
    "minContains": "use minItems",
    "maxContains": "use maxItems",
    "dependentRequired": "state the cases with anyOf, or use required",
    "dependentSchemas": "state the cases with anyOf",
    "dependencies": "state the cases with anyOf, or use required",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
"""Keywords, and what to write instead."""
ANNOTATIONS = frozenset(
    [
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$defs",
        "$vocabulary",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ]
)


class Place(NamedTuple):
    schema: Any
    path: str

    def refuse(self, keyword: str, why: str) -> ValueError:
        return ValueError(f"{self.path}/{_escape(keyword)}: {why}")

    def below(self, *keys: str | int) -> Place:
        found = self.schema
        for key in keys:
            found = found[key]
        return Place(found, "/".join([self.path, *(_escape(str(key)) for key in keys)]))


Conjunction = tuple[Place, ...]


@dataclass
class Shape:
    """`limits`: keywords with scalar values. additional, items: None where no schema says anything."""

    place: Place
    types: frozenset[str] | None = None
    values: list[Any] | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    properties: dict[str, Conjunction] = field(default_factory=dict)
    patterns: dict[str, Conjunction] = field(default_factory=dict)
    additional: Conjunction | None = None
    names: Conjunction = ()
    prefix: list[Conjunction] = field(default_factory=list)
    items: Conjunction | None = None


def read(place: Place) -> Shape:
    """The keywords that stand in a schema itself. Raises `ValueError` for one that nothing enforces."""
    shape, schema = Shape(place), place.schema
    for key, value in schema.items():
        if key in REFUSED:
            raise place.refuse(key, f"this keyword is not supported; {REFUSED[key]}")
        if key == "type":
            names = value if isinstance(value, list) else [value]
            if not names or not all(isinstance(name, str) and name in TYPES for name in names):
                raise place.refuse(key, f"{value!r:.80} is no type")
            shape.types = frozenset(names) | ({"integer"} if "number" in names else frozenset())
        elif key in ("enum", "const"):
            values = [value] if key == "const" else value
            if not isinstance(values, list) or not values:
                raise place.refuse(key, "a list of at least one value is needed")
            shape.values = values if shape.values is None else [v for v in values if _is_in(v, shape.values)]
        elif key in LARGEST | SMALLEST:
            _read_bound(shape, key, value)
        elif key in ("multipleOf", "pattern", "format"):
            is_right = isinstance(value, str) if key != "multipleOf" else _is_number(value) and value > 0
            if not is_right:
                raise place.refuse(key, f"{value!r:.80} is no value of it")
            shape.limits[key] = value
        elif key == "uniqueItems":
            if value is not False and schema.get("maxItems", 2) not in (0, 1):
                raise place.refuse(
                    key, "this keyword is not supported; use an array without it, or maxItems 1"
                )
        elif key == "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise place.refuse(key, "a list of names is needed")
            shape.required = frozenset(value)
        elif key in ("properties", "patternProperties"):
            if not isinstance(value, dict):
                raise place.refuse(key, "an object is needed")
            children = {name: (place.below(key, name),) for name in value}
            setattr(shape, "properties" if key == "properties" else "patterns", children)
        elif key == "propertyNames":
            shape.names = (place.below(key),)
        elif key == "additionalProperties":
            shape.additional = (place.below(key),)
        elif key in ("items", "prefixItems", "additionalItems"):
            _read_items(shape, key)
        elif key in ("unevaluatedProperties", "unevaluatedItems") and not isinstance(value, bool):
            raise place.refuse(key, "only true and false are supported")
    return shape


def _read_bound(shape: Shape, key: str, value: Any) -> None:
    place = shape.place
    if key.startswith("exclusive") and isinstance(value, bool):  # draft 4
        plain = key[9:].lower()
        if value and plain in place.schema:
            shape.limits[key] = place.schema[plain]
        return
    is_count = key not in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    if not _is_number(value) or (is_count and (value < 0 or value != int(value))):
        raise place.refuse(key, f"{value!r:.80} is no bound")
    shape.limits[key] = int(value) if value == int(value) else value


def _read_items(shape: Shape, key: str) -> None:
    place, value = shape.place, shape.place.schema[key]
    if key == "prefixItems" or (key == "items" and isinstance(value, list)):  # a list: drafts 4 to 2019
        if not isinstance(value, list):
            raise place.refuse(key, "a list is needed")
        shape.prefix = [(place.below(key, index),) for index in range(len(value))]
    elif key == "items" or isinstance(place.schema.get("items"), list):
        shape.items = (place.below(key),)


def merge(a: Shape, b: Shape) -> Shape | None:
    """Both. None: no value can satisfy both."""
    types = a.types if b.types is None else b.types if a.types is None else a.types & b.types
    values = a.values if b.values is None else b.values
    if a.values is not None and b.values is not None:
        values = [v for v in a.values if _is_in(v, b.values)]
    if types == frozenset() or values == []:
        return None
    length = max(len(a.prefix), len(b.prefix))
    prefix = [_item(a, index) + _item(b, index) for index in range(length)]
    return replace(
        a,
        place=a.place if a.place.path >= b.place.path else b.place,
        types=types,
        values=values,
        limits=_merge_limits(a, b),
        required=a.required | b.required,
        properties={k: _property(a, k) + _property(b, k) for k in [*a.properties, *b.properties]},
        patterns=_merge_patterns(a, b),
        additional=_both(a.additional, b.additional),
        names=a.names + b.names,
        prefix=prefix,
        items=_both(a.items, b.items),
    )


def _merge_limits(a: Shape, b: Shape) -> dict[str, Any]:
    limits = {**a.limits, **b.limits}
    for key in a.limits.keys() & b.limits.keys():
        one, other = a.limits[key], b.limits[key]
        if key in LARGEST | SMALLEST:
            limits[key] = max(one, other) if key in LARGEST else min(one, other)
        elif one != other:
            if key != "multipleOf" or one != int(one) or other != int(other):
                raise b.place.refuse(key, f"{one!r:.40} holds too: state both in one {key}")
            limits[key] = math.lcm(int(one), int(other))
    return limits


def _merge_patterns(a: Shape, b: Shape) -> dict[str, Conjunction]:
    for one, other in ((a, b), (b, a)):
        if one.patterns and (other.properties or other.patterns or other.additional is not None):
            raise one.place.refuse(
                "patternProperties", "it is combined with other properties: state them in one"
            )
    return {**a.patterns, **b.patterns}


def _property(shape: Shape, key: str) -> Conjunction:
    return shape.properties.get(key, shape.additional or ())


def _item(shape: Shape, index: int) -> Conjunction:
    return shape.prefix[index] if index < len(shape.prefix) else shape.items or ()


def _both(a: Conjunction | None, b: Conjunction | None) -> Conjunction | None:
    return b if a is None else a if b is None else a + b


def types_of(shape: Shape) -> frozenset[str]:
    """The types that its values can have."""
    if shape.values is not None:
        found = frozenset(type_of(value) for value in shape.values)
        return found if shape.types is None else found & shape.types
    return TYPES if shape.types is None else shape.types


def type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def as_key(value: Any) -> str:
    """Equal for values that are equal in JSON: 1 and 1.0, but not 1 and true."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list):
            return [plain(item) for item in value]
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    return json.dumps(plain(value), sort_keys=True)


def _is_in(value: Any, values: list[Any]) -> bool:
    return as_key(value) in {as_key(other) for other in values}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
