"""The gate of JSON schemas: what xgrammar allows behind it satisfies the schema."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xgrammar

from diptych.shared.dialects.hermes import Hermes
from diptych.shared.grammar import schema_gate
from diptych.shared.grammar.schema_gate import gate, gate_tag
from diptych.shared.grammar.schema_read import REFUSED
from diptych.shared.grammar.schema_regex import json_pattern, whole_match
from diptych.shared.grammar.spec import choice_to_ebnf
from diptych.shared.tools.conformance.server.random_schemas import PATTERNS, document, has_meaning
from tests.grammar.schema_samples import END, compiler, sample

COMPILER = compiler()
VALIDATOR = jsonschema.Draft202012Validator
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "n": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "n"],
}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}
HONOURED: list[tuple[Any, str, str]] = [
    ({"allOf": [OBJECT, {"required": ["b"]}]}, '{"a": "x", "b": 1}', '{"a": "x"}'),
    ({**OBJECT, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": "x"}', "{}"),
    ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 2}, '"ab"', '"abc"'),
    ({"$defs": {"s": {"$anchor": "s", "const": 3}}, "$ref": "#s"}, "3", "4"),
    ({"$defs": {"a/b %": {"const": 3}}, "$ref": "#/$defs/a~1b%20%25"}, "3", "4"),
    ({**OBJECT, "required": ["b"], "additionalProperties": {"type": "null"}}, '{"b": null}', '{"b": 1}'),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, '"abc"', '"abcd"'),
    ({"type": "string", "pattern": "^[a-z]+$", "minLength": 3}, '"abc"', '"ab"'),
    ({"enum": ["a", "bcd", 1, 2.0], "maxLength": 1, "type": ["string", "integer"]}, "2", '"bcd"'),
    ({"enum": [1, "x"], "type": "string"}, '"x"', "1"),
    ({"oneOf": [{"properties": {"k": {"const": c}, c: {"type": "null"}}, "type": "object"} for c in "ab"]},
     '{"k": "a", "a": null}', '{"k": "b", "a": null}'),
    ({"type": "string", "pattern": '^"$'}, '"\\""', '"""'),
    ({"type": "string", "pattern": "^a\nb$"}, '"a\\nb"', '"a\nb"'),
    ({"type": "string", "pattern": r"^\\\x22\t$"}, r'"\\\"\t"', '"\\"'),
    ({"type": "string", "pattern": "b"}, '"abc"', '"ac"'),
    ({"type": "object", "patternProperties": {"b": {"type": "null"}}}, '{"abc": null}', '{"abc": 1}'),
    ({"type": "string", "format": "date"}, '"2024-02-28"', '"2024-02-30"'),
    ({"type": "string", "format": "ipv4"}, '"255.0.10.9"', '"255.0.10.09"'),
    ({"type": "string", "format": "ipv6"}, '"2001:db8::1"', '"::1.2.3.04"'),
    ({"type": "string", "maxLength": 3}, '"é😀a"', '"\x01"'),
    ({"minLength": 2}, '"ab"', '"a"'),
    ({"type": "array", "maxItems": 2, "uniqueItems": False}, '[1, "a"]', "[1, 2, 3]"),
    ({"type": "integer", "multipleOf": 7, "minimum": 10, "exclusiveMaximum": 28}, "21", "28"),
    ({"type": "object", "properties": {"a": False}, "unevaluatedProperties": False}, "{}", '{"a": 1}'),
    (TREE, '{"v": 1, "n": {"v": 2, "n": null}}', '{"v": 1, "n": {"v": 2}}'),
]  # fmt: skip
NO: list[tuple[Any, str]] = [
    *(({"properties": {"a": {keyword: {}}}}, f"#/properties/a/{keyword}: ") for keyword in REFUSED),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "#/uniqueItems: "),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf: branches 0 and 1 may overlap"),
    ({"type": "string", "format": "email", "maxLength": 9}, "#/format: "),
    ({"type": "string", "format": "regex"}, "#/format: "),
    ({"enum": ["a"], "format": "date"}, "#/format: "),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "#/exclusiveMinimum: "),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "#/allOf/1/pattern: "),
    ({"type": "number", "multipleOf": 0.01}, "#/multipleOf: "),
    ({"type": "number", "minimum": 1e20}, "#/minimum: "),
    ({"properties": {"a": {}}, "patternProperties": {"b": {}}}, "#/patternProperties: "),
    ({"propertyNames": {"minLength": 3}}, "#/propertyNames: "),
    ({"type": "object", "minProperties": 2}, "#/minProperties: "),
    ({"$ref": "#/$defs/none"}, r"#/$ref: "),
    ({"allOf": [{"$ref": "#"}]}, "#/allOf/0/$ref: the schema refers to itself"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "#: no value satisfies"),
    ({"enum": [2**63]}, "#/enum: "),
    *(({"pattern": p}, "#/pattern: ") for p in (r"a\b", "(?=a)b", "(?<!a)b", "a^b", "a$b", "(?i)a")),
]  # fmt: skip


def allows(compiled: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(END)


def compile_gated(schema: Any) -> Any:
    return COMPILER.compile_json_schema(json.dumps(gate(schema)), any_whitespace=False)


@pytest.mark.parametrize(("schema", "right", "wrong"), HONOURED, ids=lambda value: str(value)[:60])
def test_forms_that_are_honoured(schema: Any, right: str, wrong: str) -> None:
    compiled = compile_gated(schema)
    jsonschema.validate(json.loads(right), schema)
    assert allows(compiled, right)
    assert not allows(compiled, wrong)


@pytest.mark.parametrize(("schema", "start"), NO, ids=lambda value: str(value)[:60])
def test_forms_that_are_refused_by_their_path(schema: Any, start: str) -> None:
    with pytest.raises(ValueError, match=re.escape(start)):
        gate(schema)


@pytest.mark.parametrize(
    ("first", "num_schemas"), [(0, 60), pytest.param(100_000, 21_000, marks=pytest.mark.full)]
)
def test_answers_to_random_schemas_are_valid(first: int, num_schemas: int) -> None:
    num_answers = 0
    for seed in range(first, first + num_schemas):
        rng = random.Random(seed)
        schema = document(rng)
        try:
            compiled = compile_gated(schema)
        except ValueError:
            continue
        assert has_meaning(schema), seed
        validator = VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER)
        for _ in range(10):
            answer = sample(compiled, rng)
            if answer is not None:
                num_answers += 1
                assert validator.is_valid(json.loads(answer)), (seed, answer)
    assert num_answers >= (100_000 if num_schemas > 1000 else 200)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"anyOf": [{"$ref": "#"}]}, False),
        ({"oneOf": [{"$ref": "#/$defs/x"}]}, False),
        ({"properties": {"a": {"$ref": "#"}}}, True),
        ({"properties": {"a": {"pattern": "a{2,1}"}}}, False),
        ({"patternProperties": {"a{2,1}": True}}, False),
    ],
)
def test_a_schema_that_no_validator_can_judge_is_known(found: Any, expected: bool) -> None:
    definitions = {"x": {"allOf": [{"$ref": "#z"}]}, "y": {}, "z": {"$anchor": "z", "$ref": "#/$defs/y"}}
    if "oneOf" in found:
        definitions["z"]["$ref"] = "#/$defs/x"
    assert has_meaning({**found, "$defs": definitions}) is expected


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, "(a|bc?)+", "(ab*)?c", "(?:b|b{1,2})", "^(a[ab]+){0,2}c$", "[^a-c]"]
)
def test_a_pattern_matches_as_in_python(pattern: str) -> None:
    """Every text of the grammar is one of the regex, for the keyword `pattern` and for the field `regex`."""
    rng = random.Random(pattern)
    text = COMPILER.compile_regex(whole_match(pattern))
    schema = {"anyOf": [{"type": "string", "pattern": p} for p in json_pattern(pattern)]}
    quoted = COMPILER.compile_json_schema(json.dumps(schema), any_whitespace=False)
    for _ in range(20):
        answer, string = sample(text, rng), sample(quoted, rng)
        assert answer is None or "\ufffd" in answer or re.fullmatch(pattern, answer)
        assert string is None or re.search(pattern, json.loads(string))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\Aa\Z", "a", "Aa"),
        (r"^a\z", "a", "az"),
        (".+", "ab", "a\nb"),
        ("^a|b$", "b", "ab"),
        (r"\S", "a", "\x1f"),
        (r"[ -~]+", "<a", ""),
        ("a+?", "aa", ""),
        (r"(?P<year>\d{4})", "2024", "٢٠٢٤"),
    ],
)
def test_the_dialect_of_a_regex(pattern: str, right: str, wrong: str) -> None:
    compiled = COMPILER.compile_regex(whole_match(pattern))
    assert allows(compiled, right)
    assert not (allows(compiled, wrong) if wrong else xgrammar.GrammarMatcher(compiled).accept_token(END))


def test_a_choice_has_whole_characters() -> None:
    assert allows(COMPILER.compile_grammar(choice_to_ebnf(["é", "😀"])), "😀")


def test_a_tool_may_have_a_recursive_schema() -> None:
    tag = json.dumps(
        gate_tag({"type": "structural_tag", "format": Hermes().calls_format({"f": TREE}, False)})
    )
    compiled = COMPILER.compile_structural_tag(tag)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert allows(compiled, call % '{"v": 1, "n": {"v": 2, "n": null}}')
    assert not allows(compiled, call % '{"v": 1, "n": {"v": 2}}')


def test_a_refused_schema_of_a_tool_names_the_tool() -> None:
    calls = Hermes().calls_format({"g": TREE, "f": {"properties": {"a": {"not": {}}}}}, True)
    with pytest.raises(ValueError, match=r"\"f\".*: #/properties/a/not: "):
        gate_tag({"type": "structural_tag", "format": calls})


def test_the_page_lists_the_keywords() -> None:
    page = (Path(__file__).parents[2] / "docs/structured-output.md").read_text("utf-8")
    refused = re.search(r"^\| Refused \|(.*)\|$", page, re.M)
    formats = re.search(r"^\| `format` \|(.*)\|$", page, re.M)
    assert refused is not None
    assert formats is not None
    assert set(re.findall("`(.+?)`", refused[1])) == set(REFUSED)
    assert set(re.findall("`(.+?)`", formats[1])) == schema_gate.FORMATS | schema_gate.REFUSED_FORMATS
