"""Rewrites a JSON schema into one that xgrammar enforces exactly, or refuses it.

xgrammar ignores some keywords, and some combinations of those that it knows. `gate` writes a new schema from
the few forms that it enforces. Every answer that the new schema allows satisfies the old one; the old one may
allow more (objects with declared properties have no others).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from diptych.shared.grammar.schema_read import Conjunction, Place, Shape, as_key, type_of
from diptych.shared.grammar.schema_regex import json_pattern, whole_match
from diptych.shared.grammar.schema_shape import Shapes

MAX_DEFINITIONS = 2000
MAX_LISTED = 1000
"""Multiples in a range, which become an enum."""
FORMATS = frozenset(
    [
        "date",
        "date-time",
        "time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    ]
)
"""Formats that are enforced."""
REFUSED_FORMATS = frozenset(["regex", "iri", "iri-reference", "idn-email", "idn-hostname"])
DAY = (
    r"[12]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:Z|\.\d{3}Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]\d|\d)"
FORMAT_PATTERNS = {"date": f"^{DAY}$", "time": f"^{TIME}$", "date-time": f"^{DAY}T{TIME}$"}
FORMAT_PATTERNS["ipv4"] = rf"^{OCTET}\.{OCTET}\.{OCTET}\.{OCTET}$"
_GROUPS = [":".join(["[0-9a-fA-F]{1,4}"] * count) for count in range(9)]
FORMAT_PATTERNS["ipv6"] = "|".join(
    [f"^{_GROUPS[8]}$", *(f"^{_GROUPS[i]}::{_GROUPS[j]}$" for i in range(8) for j in range(8 - i))]
)
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def gate(schema: Any) -> Any:
    """The schema for xgrammar. Raises `ValueError` with the JSON path of what cannot be enforced."""
    try:
        return _Gate(schema).whole()
    except RecursionError:
        raise ValueError("#: the schema is nested too deeply") from None


def gate_tag(document: Any) -> Any:
    """A structural tag whose schemas and regexes have passed. Errors say behind which text they stand."""
    if isinstance(document, list):
        return [gate_tag(child) for child in document]
    if not isinstance(document, dict):
        return document
    if document.get("type") == "regex" and isinstance(document.get("pattern"), str):
        pattern = whole_match(document["pattern"])
        return {**document, "pattern": pattern} if pattern else {"type": "const_string", "value": ""}
    try:
        return {
            key: gate(value) if key == "json_schema" else gate_tag(value) for key, value in document.items()
        }
    except ValueError as error:
        if isinstance(document.get("begin"), str):
            raise ValueError(f"behind {document['begin']!r}: {error}") from None
        raise


class _Gate:
    """`defs`: what was written, by the places that it was written from. A method that returns None has found
    that no value satisfies the schema."""

    def __init__(self, document: Any) -> None:
        self.shapes = Shapes(document)
        self.names: dict[frozenset[tuple[str, bool]], str] = {}
        self.defs: dict[str, Any] = {}

    def whole(self) -> Any:
        schema = self.write((self.shapes.root,))
        if schema is None:
            raise ValueError("#: no value satisfies the schema")
        used = {name: value for name, value in self.defs.items() if value is not None}
        return {**schema, "$defs": used} if schema else schema

    def write(self, places: Conjunction) -> Any:
        """One schema for a conjunction. A definition each, so that recursion ends."""
        places = tuple(self.shapes.followed(place) for place in places if place.schema is not True)
        key = frozenset((place.path, place.schema is False) for place in places)
        if not key:
            return {}
        if key not in self.names:
            name = self.names[key] = f"n{len(self.names)}"
            if len(self.names) > MAX_DEFINITIONS:
                raise ValueError(f"{places[0].path}: the schema has more than {MAX_DEFINITIONS} parts")
            parts = [part for shape in self.shapes.of(places) for part in self.parts(shape)]
            parts = list({json.dumps(part, sort_keys=True): part for part in parts}.values())
            self.defs[name] = (
                ({} if {} in parts else {"anyOf": parts} if parts[1:] else parts[0]) if parts else None
            )
        name = self.names[key]
        if name in self.defs and not self.defs[name]:
            return self.defs[name]
        return {"$ref": f"#/$defs/{name}"}

    def parts(self, shape: Shape) -> list[Any]:
        """A schema for each type of the shape."""
        if shape.values is not None:
            return self.values(shape)
        types = shape.types
        if types is None:
            types = frozenset(t for t, keys in OF_TYPE.items() if shape.limits.keys() & set(keys))
            if (
                shape.properties
                or shape.patterns
                or shape.required
                or shape.names
                or shape.additional is not None
            ):
                types |= {"object"}
            if shape.prefix or shape.items is not None:
                types |= {"array"}
            if not types:
                return [{}]
        parts = []
        for name in sorted(types - {"integer"} if "number" in types else types):
            limits = {
                k: shape.limits[k]
                for k in OF_TYPE.get(name.replace("integer", "number"), ())
                if k in shape.limits
            }
            if name in ("number", "integer"):
                found = self.number(shape.place, name, limits)
            elif name == "string":
                found = self.strings(shape.place, limits)
            elif name == "array":
                found = self.array(shape, limits)
            elif name == "object":
                found = self.object(shape, limits)
            else:
                found = [{"type": name}]
            parts += found
        return parts

    def values(self, shape: Shape) -> list[Any]:
        """An enum of the values that satisfy the other keywords."""
        kept = []
        for value in shape.values or ():
            kind = type_of(value)
            if shape.types is not None and kind not in shape.types:
                continue
            if kind == "array" and (
                shape.prefix or shape.items is not None or shape.limits.keys() & {*OF_TYPE[kind]}
            ):
                raise shape.place.refuse("enum", "arrays beside keywords for arrays: state one or the other")
            has_keys = shape.properties or shape.patterns or shape.names or shape.additional is not None
            if kind == "object" and (has_keys or shape.required or shape.limits.keys() & {*OF_TYPE[kind]}):
                raise shape.place.refuse(
                    "enum", "objects beside keywords for objects: state one or the other"
                )
            if isinstance(value, (int, float)) and not -(2**63) <= value < 2**63 and kind == "integer":
                raise shape.place.refuse("enum", f"{value} is beyond 64 bits")
            if kind == "string" and shape.limits.get("format") in FORMATS | REFUSED_FORMATS:
                raise shape.place.refuse("format", "an enum stands beside it: state one of them")
            if kind in ("string", "integer", "number") and not _satisfies(value, shape):
                continue
            kept.append(int(value) if kind == "integer" else value)
        return [{"enum": list({as_key(value): value for value in kept}.values())}] if kept else []

    def number(self, place: Place, name: str, limits: dict[str, Any]) -> list[Any]:
        step = limits.pop("multipleOf", None)
        if step is not None and step != int(step):
            raise place.refuse("multipleOf", "only whole numbers are supported")
        if name == "number" and step is None:
            for key, bound in limits.items():
                if abs(bound) >= 10**9 or round(bound, 6) != bound:
                    raise place.refuse(
                        key, "a bound of a number has at most 9 digits before the point and 6 behind it"
                    )
            low = max((limits[k] for k in ("minimum", "exclusiveMinimum") if k in limits), default=-math.inf)
            high = min((limits[k] for k in ("maximum", "exclusiveMaximum") if k in limits), default=math.inf)
            num_open = (low == limits.get("exclusiveMinimum")) + (high == limits.get("exclusiveMaximum"))
            if num_open == 2 and 0 < high - low < 1.5e-6:
                raise place.refuse("exclusiveMinimum", "no number with 6 digits behind the point is between")
            return [] if low > high or (low == high and num_open) else [{"type": "number", **limits}]
        lows = [math.ceil(limits[k]) for k in ("minimum",) if k in limits]
        lows += [math.floor(limits[k]) + 1 for k in ("exclusiveMinimum",) if k in limits]
        highs = [math.floor(limits[k]) for k in ("maximum",) if k in limits]
        highs += [math.ceil(limits[k]) - 1 for k in ("exclusiveMaximum",) if k in limits]
        low, high = max(lows, default=None), min(highs, default=None)
        bounds = {k: v for k, v in (("minimum", low), ("maximum", high)) if v is not None}
        if any(abs(bound) >= 2**62 for bound in bounds.values()):
            raise place.refuse(next(iter(limits)), "a bound of an integer is below 2^62")
        if low is not None and high is not None and low > high:
            return []
        if step is None or step == 1:
            return [{"type": "integer", **bounds}]
        if low is not None and high is not None and (high - low) // step < MAX_LISTED:
            multiples = list(range(-(-low // int(step)) * int(step), high + 1, int(step)))
            return [{"enum": multiples}] if multiples else []
        if bounds or step > 1024:
            raise place.refuse(
                "multipleOf", "without two near bounds it is supported up to 1024, and without any"
            )
        return [{"type": "integer", "multipleOf": int(step)}]

    def strings(self, place: Place, limits: dict[str, Any]) -> list[Any]:
        low, high = limits.get("minLength", 0), limits.get("maxLength")
        form = limits.get("format")
        if high is not None and low > high:
            return []
        if form in REFUSED_FORMATS:
            raise place.refuse("format", f"{form!r} is not supported: use a pattern")
        if form in FORMATS and len(limits) > 1:
            raise place.refuse("format", "a pattern or a length stands beside it: state one of them")
        pattern = limits.get("pattern", FORMAT_PATTERNS.get(form or ""))
        if pattern is None and limits.keys() & {"minLength", "maxLength"}:
            pattern = "^.*$"  # xgrammar's own lengths let control characters through
        if pattern is not None:
            try:
                found = json_pattern(pattern, (low, high))
            except ValueError as error:
                raise place.refuse("pattern", str(error)) from None
            return [{"type": "string", "pattern": text} for text in found]
        return [{"type": "string", **({"format": form} if form in FORMATS else {})}]

    def array(self, shape: Shape, limits: dict[str, Any]) -> list[Any]:
        low, high = limits.get("minItems", 0), limits.get("maxItems", math.inf)
        prefix = []
        for index, places in enumerate(shape.prefix):
            item = self.write(places)
            high = min(high, index) if item is None else high
            prefix.append(item)
        prefix = prefix[: int(min(high, len(prefix)))]
        is_closed = shape.items is None and prefix and low <= len(prefix)
        items = None if is_closed or high <= len(prefix) else self.write(shape.items or ())
        high = len(prefix) if items is None else high
        if low > high:
            return []
        found = {"type": "array", "items": False if items is None else items, "minItems": low}
        if prefix:
            found["prefixItems"] = prefix
        if items is not None and high < math.inf:
            found["maxItems"] = high
        return [{k: v for k, v in found.items() if (k, v) != ("minItems", 0)}]

    def object(self, shape: Shape, limits: dict[str, Any]) -> list[Any]:
        low, high = limits.get("minProperties", 0), limits.get("maxProperties", math.inf)
        if low > high:
            return []
        if shape.names or shape.patterns:
            return self.named(shape, limits)
        if shape.properties or shape.required:
            return self.declared(shape, low, high)
        value = self.write(shape.additional or ())
        if value is None:
            return [] if low else [{"type": "object", "additionalProperties": False}]
        if low > 1:
            raise shape.place.refuse(
                "minProperties", "above 1 it needs declared properties: a name may come twice"
            )
        return [{"type": "object", "additionalProperties": value, **limits}]

    def declared(self, shape: Shape, low: int, high: float) -> list[Any]:
        """Properties by name, and no others."""
        found = {}
        for name in [*shape.properties, *sorted(shape.required - shape.properties.keys())]:
            value = self.write(shape.properties.get(name, shape.additional or ()))
            if value is not None:
                found[name] = value
        required = [name for name in found if name in shape.required]
        if len(required) < len(shape.required) or low > len(found) or high < len(required):
            return []
        schema: dict[str, Any] = {"type": "object", "additionalProperties": False}
        if found and high > 0:
            schema |= {"properties": found, "required": required}
            schema |= {"minProperties": low} if low > len(required) else {}
            schema |= {"maxProperties": int(high)} if high < len(found) else {}
        return [schema]

    def named(self, shape: Shape, limits: dict[str, Any]) -> list[Any]:
        """Names by a pattern, from propertyNames or patternProperties."""
        keyword = "patternProperties" if shape.patterns else "propertyNames"
        if shape.properties or shape.required or limits or len(shape.patterns) + bool(shape.names) > 1:
            raise shape.place.refuse(
                keyword, "it is supported alone: no other keyword for properties beside it"
            )
        if shape.patterns:
            ((pattern, places),) = shape.patterns.items()
        else:
            shapes = self.shapes.of(shape.names)
            if len(shapes) != 1 or shapes[0].limits.keys() != {"pattern"} or shapes[0].values is not None:
                raise shape.place.refuse(keyword, "only a pattern is supported")
            pattern, places = shapes[0].limits["pattern"], shape.additional or ()
        try:
            patterns = json_pattern(pattern)
        except ValueError as error:
            raise shape.place.refuse(keyword, str(error)) from None
        value = self.write(places)
        if value is None:
            return [{"type": "object", "additionalProperties": False}]
        by_pattern = dict.fromkeys(patterns, value)
        return [{"type": "object", "patternProperties": by_pattern, "additionalProperties": False}]


def _satisfies(value: Any, shape: Shape) -> bool:
    """Whether a string or a number is within the limits."""
    limits = shape.limits
    if isinstance(value, str):
        if not limits.get("minLength", 0) <= len(value) <= limits.get("maxLength", math.inf):
            return False
        if "pattern" not in limits:
            return True
        try:
            return re.search(limits["pattern"], value) is not None
        except re.error as error:
            raise shape.place.refuse("pattern", str(error)) from None
    step = limits.get("multipleOf")
    if step is not None and (step != int(step) or value != int(value)):
        raise shape.place.refuse("multipleOf", "only whole numbers are supported beside an enum")
    return (
        limits.get("minimum", -math.inf) <= value <= limits.get("maximum", math.inf)
        and limits.get("exclusiveMinimum", -math.inf) < value < limits.get("exclusiveMaximum", math.inf)
        and (step is None or value % step == 0)
    )
