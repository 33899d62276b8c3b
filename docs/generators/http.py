"""Endpoints and fields of the HTTP API, from FastAPI's OpenAPI schema and the models of the bodies."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diptych.shared.server.api.body import Body
from diptych.shared.server.api.field_table import IGNORED, REFUSED, rules
from docs.generators.classes import named
from docs.generators.tables import cell, code, table


@cache
def _schema() -> dict[str, Any]:
    """The application without an engine: routes read the engine only when they are called."""
    from diptych.shared.server.api.state import ServerSettings
    from diptych.shared.server.app import create_app

    state: Any = SimpleNamespace(settings=ServerSettings(), ready=SimpleNamespace(vision=None))
    return create_app(state).openapi()


def endpoints(notes: dict[str, str] | None = None) -> str:
    """All routes. `notes`: "POST/v1/messages: text", one for each."""
    notes = dict(notes or {})
    rows = []
    for path, operations in _schema()["paths"].items():
        for method in operations:
            key = f"{method.upper()}{path}"
            rows.append([f"`{method.upper()} {path}`", cell(notes.pop(key, ""))])
    if notes:
        raise ValueError(f"no route {', '.join(notes)}")
    return table(["Route", "Purpose"], rows)


def treatment(place: str, name: str) -> str:
    """What a body does with a field: "accepted", "ignored" or "refused"."""
    models = [each for each in _subclasses(Body) if each.place == place]
    if not models:
        raise ValueError(f"no body has the place {place!r}")
    if any(name == (field.alias or key) for each in models for key, field in each.model_fields.items()):
        return "accepted"
    rule = rules(place).get(name)
    return "ignored" if rule is not None and rule.is_ignored else "refused"


def _subclasses(base: type[Body]) -> list[type[Body]]:
    direct = base.__subclasses__()
    return direct + [each for one in direct for each in _subclasses(one)]


def fields() -> str:
    """The table of fields that are ignored, or refused with a reason."""
    rows = [
        [code(name), code(place), word, cell(reason)]
        for word, listed in (("ignored", IGNORED), ("refused", REFUSED))
        for places, names in listed.items()
        for place in places.split()
        for name, reason in names.items()
    ]
    return table(
        ["Field", "In", "Treatment", "Reason"], sorted(rows, key=lambda row: (row[1], row[2], row[0]))
    )


PUBLIC = Path(__file__).parent / "public_fields.json"
"""The fields of the bodies of SGLang and vLLM, by place."""

WORDS = {"accepted": "yes", "ignored": "ignored", "refused": "no (400)"}


def public_fields(server: str) -> str:
    """What this server does with each field of another's bodies."""
    found = json.loads(PUBLIC.read_text("utf-8"))
    rows = []
    for place, names in found[server].items():
        kinds: dict[str, list[str]] = {kind: [] for kind in WORDS}
        for name in sorted(names.split()):
            kinds[treatment(place, name)].append(code(name))
        rows += [[code(place), word, ", ".join(kinds[kind])] for kind, word in WORDS.items() if kinds[kind]]
    return f"{found['sources'][server]}:\n\n" + table(["Body", "Here", "Fields"], rows)


def bodies() -> set[str]:
    """Names of the models that routes take."""
    text = json.dumps(_schema()["paths"])
    return set(re.findall(r"#/components/schemas/(\w+Request)", text))


def body(dotted: str, only: str = "", notes: dict[str, str] | None = None) -> str:
    """The fields of a body, with their meanings as notes. `only` = "own": without inherited fields."""
    notes = dict(notes or {})
    model = named(dotted)
    schema = model.model_json_schema()
    inherited: set[str] = set()
    if only:
        assert only == "own"
        inherited = {name for base in model.__bases__ for name in base.model_json_schema()["properties"]}
    rows = []
    for name, prop in schema["properties"].items():
        if name in inherited:
            continue
        default = "required" if name in schema.get("required", ()) else _default(prop.get("default"))
        kinds = [each for each in prop.get("anyOf", prop.get("oneOf", [prop])) if each.get("type") != "null"]
        row = [code(name), code(" | ".join(map(_kind, kinds))), default, _range([prop, *kinds])]
        rows.append([*row, cell(notes.pop(name, ""))])
    if notes:
        raise ValueError(f"{dotted} has no field {', '.join(notes)}")
    return table(["Field", "Type", "Default", "Range", "Meaning"], rows)


def _default(value: Any) -> str:
    return "" if value is None or isinstance(value, dict) else code(json.dumps(value))


def _kind(prop: dict[str, Any]) -> str:
    """Of a JSON schema: "string", "list of integer", "Message"."""
    if "$ref" in prop:
        return str(prop["$ref"]).rpartition("/")[2]
    if "const" in prop or "enum" in prop:
        return ", ".join(json.dumps(each) for each in prop.get("enum", [prop.get("const")]))
    if prop.get("type") == "array":
        items = prop.get("items", {})
        kinds = items.get("anyOf", items.get("oneOf", [items]))
        return f"list of {' or '.join(map(_kind, kinds))}"
    return str(prop.get("type", "any"))


def _range(props: list[dict[str, Any]]) -> str:
    signs = {
        "minimum": "≥ {}",
        "exclusiveMinimum": "> {}",
        "maximum": "≤ {}",
        "exclusiveMaximum": "< {}",
        "minItems": "length ≥ {}",
    }
    found = [sign.format(each[key]) for key, sign in signs.items() for each in props if key in each]
    found = list(dict.fromkeys(found))
    return ", ".join(found) if not any(str(2**63) in each for each in found) else "64-bit"
