"""What a grammar is made from, and the limits that hold before anything is compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from diptych.shared.types import SamplingParams

MAX_BYTES = 64 * 2**10
"""Of the text of a grammar."""
MAX_DEPTH = 32
"""Nested brackets: objects and arrays of a JSON document, groups of a regex or of EBNF."""
MAX_REPETITIONS = 10_000
"""The largest bound of a repetition, such as maxItems or {m,n}."""
Kind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]

_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REPETITION = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


class GrammarSpec(NamedTuple):
    """A grammar before it is compiled. Equal specs compile to equal grammars."""

    kind: Kind
    text: str  # "" for json_object


def spec_of(params: SamplingParams) -> GrammarSpec | None:
    """The grammar that the parameters ask for; None: all texts are allowed. Raises `ValueError` for one that
    exceeds the limits."""
    spec: GrammarSpec | None = None
    if params.json_schema is not None:
        assert isinstance(params.json_schema, str), "a mapping becomes its text when the parameters are made"
        spec = GrammarSpec("json_schema", params.json_schema)
    elif params.json_object:
        spec = GrammarSpec("json_object", "")
    elif params.regex is not None:
        spec = GrammarSpec("regex", params.regex)
    elif params.ebnf is not None:
        spec = GrammarSpec("ebnf", params.ebnf)
    elif params.choice:
        spec = GrammarSpec("ebnf", choice_to_ebnf(params.choice))
    elif params.structural_tag is not None:
        spec = GrammarSpec("structural_tag", params.structural_tag)
    if spec is not None:
        check_limits(spec)
    return spec


def choice_to_ebnf(choice: Sequence[str]) -> str:
    """One of the texts, literally."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)


def check_limits(spec: GrammarSpec) -> None:
    """Raise `ValueError` for a text that is too long, nested too deeply, or repeats too often."""
    kind, text = spec
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{kind}: the text is no valid Unicode") from None
    if num_bytes > MAX_BYTES:
        raise ValueError(f"{kind} has {num_bytes} bytes; at most {MAX_BYTES} are allowed")
    if "\0" in text:
        raise ValueError(f"{kind}: a NUL character is not allowed")
    plain = _without_literals(kind, text)
    if kind in ("json_schema", "structural_tag"):
        _check_depth(kind, plain, "{[", "}]")
        _check_document(kind, text)
    else:
        _check_depth(kind, plain, "(", ")")
        for match in _REPETITION.finditer(plain):
            _check_repetitions(kind, max(int(bound or 0) for bound in match.groups("")))


def _without_literals(kind: Kind, text: str) -> str:
    """Remove strings, character classes, comments and escaped characters. One pass: a regex that looks for
    the end of each of them would take quadratic time where there is none."""
    has_strings, has_classes = kind != "regex", kind in ("regex", "ebnf")
    kept: list[str] = []
    end = ""  # of the literal that is open
    is_escaped = False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif end:
            end = "" if character == end else end
        elif character == '"' and has_strings:
            end = '"'
        elif character == "[" and has_classes:
            end = "]"
        elif character == "#" and kind == "ebnf":
            end = "\n"
        else:
            kept.append(character)
    return "".join(kept)


def _check_document(kind: Kind, text: str) -> None:
    """A JSON document, not nested too deeply for a parser that recurses."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{kind} is not valid JSON: {error}") from None
    if not isinstance(document, (dict, bool)):
        raise ValueError(f"{kind} must be a JSON object, got {type(document).__name__}")
    for key, value in _entries(document):
        if key in _BOUNDS and isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_repetitions(f"{kind}: {key}", value)
        if key == "pattern" and isinstance(value, str):
            check_limits(GrammarSpec("regex", value))
        if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
            raise ValueError(f"{kind}: $ref {value!r} leads outside of the schema; only '#...' is allowed")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values of a document, at any depth."""
    if isinstance(value, dict):
        yield from value.items()
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _entries(child)


def _check_depth(kind: str, text: str, opening: str, closing: str) -> None:
    depth = 0
    for character in text:
        if character in opening:
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"{kind} is nested more than {MAX_DEPTH} levels deep")
        elif character in closing:
            depth -= 1


def _check_repetitions(where: str, bound: float) -> None:
    if bound > MAX_REPETITIONS:
        raise ValueError(f"{where} repeats up to {bound} times; at most {MAX_REPETITIONS} are allowed")
