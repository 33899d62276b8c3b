"""Alternatives of a JSON schema: references followed, allOf merged, anyOf and oneOf distributed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

from diptych.shared.grammar.schema_read import (
    ANNOTATIONS,
    Conjunction,
    Place,
    Shape,
    as_key,
    merge,
    read,
    types_of,
)

MAX_ALTERNATIVES = 64
MAX_NESTED = 64


class Shapes:
    """Finds the alternatives of the schemas in one document."""

    def __init__(self, document: Any) -> None:
        self.root = Place(document, "#")
        self.anchors: dict[str, list[Place]] = {}
        self._find_anchors(self.root)

    def of(self, places: Conjunction, refs: tuple[str, ...] = ()) -> list[Shape]:
        """The alternatives of a conjunction. None: no value satisfies it."""
        found = [Shape(places[0] if places else self.root)]
        for place in places:
            found = self._pairs(found, self._of_one(place, refs), place)
        return found

    def target(self, place: Place) -> Place:
        """What its $ref names."""
        ref = place.schema["$ref"]
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise place.refuse("$ref", f"{ref!r} leads outside of the schema; only '#...' is allowed")
        ref = unquote(ref)
        if ref != "#" and not ref.startswith("#/"):
            named = self.anchors.get(ref[1:], [])
            if len(named) != 1:
                raise place.refuse("$ref", f"there is not one $anchor {ref[1:]!r}")
            return named[0]
        found = self.root
        for part in ref.split("/")[1:]:
            key: Any = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found.schema, list) and key.isdecimal():
                key = int(key)
            try:
                found = found.below(key)
            except (KeyError, IndexError, TypeError):
                raise place.refuse("$ref", f"{ref!r} names no place of the schema") from None
        return found

    def _find_anchors(self, place: Place) -> None:
        schema = place.schema
        if isinstance(schema, dict):
            if isinstance(schema.get("$anchor"), str):
                self.anchors.setdefault(schema["$anchor"], []).append(place)
            if isinstance(schema.get("$id"), str) and place.path != "#" and "$ref" in json.dumps(schema):
                raise place.refuse("$id", "it changes what a $ref means: remove it")
        for key in (
            schema if isinstance(schema, dict) else range(len(schema)) if isinstance(schema, list) else ()
        ):
            self._find_anchors(place.below(key))

    def _of_one(self, place: Place, refs: tuple[str, ...]) -> list[Shape]:
        schema = place.schema
        if schema is True or schema is False:
            return [Shape(place)] if schema else []
        if not isinstance(schema, dict):
            raise ValueError(f"{place.path}: a schema is an object or a boolean, got {schema!r:.80}")
        if len(refs) > MAX_NESTED:
            raise ValueError(f"{place.path}: references and combinations are nested too deeply")
        found = [read(place)]
        if "$ref" in schema:
            target = self.target(place)
            if target.path in refs:
                raise place.refuse(
                    "$ref", "the schema refers to itself without a property or an item between"
                )
            found = self._pairs(found, self._of_one(target, (*refs, target.path)), place)
        for index in _indexes(place, "allOf"):
            part = self._of_one(place.below("allOf", index), (*refs, ""))
            found = self._pairs(found, part, place)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                branches = [
                    self._of_one(place.below(keyword, index), (*refs, ""))
                    for index in _indexes(place, keyword)
                ]
                if keyword == "oneOf":
                    self._separate(branches, place)
                found = self._pairs(found, [shape for branch in branches for shape in branch], place)
        return [_close(shape, schema) for shape in found]

    def _pairs(self, left: list[Shape], right: list[Shape], place: Place) -> list[Shape]:
        if len(left) * len(right) > MAX_ALTERNATIVES:
            raise ValueError(
                f"{place.path}: the schema has more than {MAX_ALTERNATIVES} combined alternatives"
            )
        merged = (merge(a, b) for a, b in product(left, right))
        return [shape for shape in merged if shape is not None]

    def _separate(self, branches: list[list[Shape]], place: Place) -> None:
        """Make the branches of a oneOf exclude each other, by a required property with different values."""
        for (i, one), (j, other) in combinations(enumerate(branches), 2):
            for a, b in product(one, other):
                if self._are_disjoint(a, b):
                    continue
                key = next((key for key in a.properties if self._differ(a, b, key)), None)
                if key is None or not types_of(a) & types_of(b) <= {"object"}:
                    why = f"branches {i} and {j} may overlap: use anyOf, or a required property with a const"
                    raise place.refuse("oneOf", why)
                a.required |= {key}
                b.required |= {key}

    def _are_disjoint(self, a: Shape, b: Shape) -> bool:
        if a.values is not None and b.values is not None:
            return not {as_key(v) for v in a.values} & {as_key(v) for v in b.values}
        common = types_of(a) & types_of(b)
        if common == {"object"}:
            return any(self._differ(a, b, key) for key in a.required & b.required)
        return not common

    def _differ(self, a: Shape, b: Shape, key: str) -> bool:
        """Whether no value of this property suits both."""
        if key not in a.properties or key not in b.properties:
            return False
        one, other = (self._values(shape.properties[key]) for shape in (a, b))
        return one is not None and other is not None and not one & other

    def _values(self, places: Conjunction) -> set[str] | None:
        """All values that an enum or a const leaves; None: neither is there."""
        for place in places:
            place = self.followed(place)
            schema = place.schema if isinstance(place.schema, dict) else {}
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if isinstance(values, list):
                return {as_key(value) for value in values}
        return None

    def followed(self, place: Place) -> Place:
        """The place behind references that have no other keywords beside them."""
        seen: set[str] = set()
        while isinstance(place.schema, dict) and "$ref" in place.schema:
            if place.schema.keys() - ANNOTATIONS != {"$ref"} or place.path in seen:
                break
            seen.add(place.path)
            place = self.target(place)
        return place


def _close(shape: Shape, schema: dict[str, Any]) -> Shape:
    """Honour unevaluatedProperties and unevaluatedItems: false."""
    place = Place(False, shape.place.path)
    if schema.get("unevaluatedProperties") is False and shape.additional is None:
        shape = replace(shape, additional=(place,))
    if schema.get("unevaluatedItems") is False and shape.items is None:
        shape = replace(shape, items=(place,))
    return shape


def _indexes(place: Place, keyword: str) -> Iterator[int]:
    branches = place.schema.get(keyword, [])
    if not isinstance(branches, list) or (keyword in place.schema and not branches):
        raise place.refuse(keyword, "a list of at least one schema is needed")
    yield from range(len(branches))
