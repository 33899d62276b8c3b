"""What a grammar is made from, and the limits before anything is compiled."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from diptych.shared.grammar.spec import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_REPETITIONS,
    GrammarSpec,
    check_limits,
    choice_to_ebnf,
    spec_of,
)
from diptych.shared.types import SamplingParams

NODE = {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"}


def nested(depth: int) -> Any:
    return {"properties": {"a": nested(depth - 2)}} if depth > 0 else {}


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ({}, None, None),
        ({"choice": None}, None, None),
        ({"json_object": True}, "json_object", ""),
        ({"json_schema": {"type": "string"}}, "json_schema", '{"type": "string"}'),
        ({"json_schema": '{"type":"string"}'}, "json_schema", '{"type":"string"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"choice": ["a", 'b"\n\\é']}, "ebnf", 'root ::= "a" | "b\\"\\n\\\\é"'),
    ],
)
def test_the_spec_of_a_request(params: dict[str, Any], kind: str | None, text: str | None) -> None:
    found = spec_of(SamplingParams(**params))
    assert found == (None if kind is None else GrammarSpec(kind, text))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"regex": "a", "choice": ("b",)}, "regex and choice exclude each other"),
        ({"json_object": True, "ebnf": "x"}, "json_object and ebnf exclude"),
        ({"regex": 3}, "regex must be a text"),
        ({"choice": ("",)}, "choice must hold non-empty strings"),
        ({"choice": []}, "choice must hold at least one text"),
        ({"choice": ()}, "choice must hold at least one text"),
        ({"json_schema": {"a": object()}}, "json_schema is no JSON"),
        ({"json_schema": [1]}, "json_schema must be a text"),
        ({"json_object": 1}, "json_object must be True or False"),
    ],
)
def test_parameters_that_are_refused(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "a" * (MAX_BYTES + 1), "at most 65536"),
        ("regex", "é" * (MAX_BYTES // 2 + 1), "at most 65536"),
        ("regex", "\ud800", "no valid Unicode"),
        ("regex", "a\0", "NUL"),
        ("regex", "(" * (MAX_DEPTH + 1) + ")" * (MAX_DEPTH + 1), "nested more than 32"),
        ("regex", f"a{{{MAX_REPETITIONS + 1}}}", "at most 10000"),
        ("regex", f"a{{1,{MAX_REPETITIONS + 1}}}", "at most 10000"),
        ("ebnf", "root ::= " + "(" * (MAX_DEPTH + 1), "nested more than 32"),
        ("ebnf", f'root ::= "a"{{2, {MAX_REPETITIONS + 1}}}', "at most 10000"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", '{"a": NaN}', "not valid JSON"),
        ("json_schema", "[1]", "must be a JSON object"),
        ("json_schema", json.dumps(nested(MAX_DEPTH)), "nested more than 32"),
        ("json_schema", '{"maxItems": 10001}', "maxItems"),
        ("json_schema", '{"properties": {"a": {"minLength": 1e9}}}', "minLength"),
        ("json_schema", '{"pattern": "a{99999}"}', "at most 10000"),
        ("json_schema", '{"$ref": "http://example.org/schema"}', "leads outside"),
        ("structural_tag", "[" * 40, "nested more than 32"),
    ],
)
def test_limits(kind: Any, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_limits(GrammarSpec(kind, text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a" * MAX_BYTES),
        ("regex", r"\(" * 100 + "[(]" * 100 + "x{10000}"),
        ("ebnf", 'root ::= "((((((((((((((((((((((((((((((((((((" | [(((((((((((((((((((((((((((((((((]'),
        ("json_schema", json.dumps(nested(MAX_DEPTH - 2))),
        ("json_schema", json.dumps({"description": "[" * 100, "maxItems": 10000})),
        ("json_schema", json.dumps({"properties": {"maxItems": {"type": "integer"}}})),
        ("json_schema", json.dumps(NODE)),
    ],
)
def test_what_is_within_the_limits(kind: Any, text: str) -> None:
    check_limits(GrammarSpec(kind, text))


@pytest.mark.parametrize("text", ['"' + '\\"' * 32000, "[" * 65000, '"' * 65001, "{" * 65000, "{1" * 32000])
@pytest.mark.parametrize("kind", ["regex", "ebnf", "json_schema"])
def test_checking_takes_linear_time(kind: Any, text: str) -> None:
    start = time.thread_time()
    with contextlib.suppress(ValueError):
        check_limits(GrammarSpec(kind, text))
    assert time.thread_time() - start < 1.0


def test_a_choice_is_literal() -> None:
    assert choice_to_ebnf(["a", "😀"]) == 'root ::= "a" | "😀"'
