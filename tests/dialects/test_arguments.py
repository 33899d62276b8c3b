"""Arguments under a grammar: what it allows satisfies the schema of the tool, or the schema is refused."""

from __future__ import annotations

import json
import math
import random
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("xgrammar") is None or find_spec("jsonschema") is None:
    pytest.skip("needs xgrammar and jsonschema", allow_module_level=True)

import jsonschema

from diptych.shared.dialects.parts.choose import dialects
from diptych.shared.grammar.worker import compile_spec
from diptych.shared.tools.conformance.oracles.read_answers import read
from diptych.shared.tools.conformance.server.random_schemas import document, schema
from tests.grammar.schema_samples import compiler, sample

COMPILER = compiler()
FORMS = ["hermes", "qwen3_coder", "glm", "glm47", "minimax", "deepseek_v32", "gemma4", "pythonic"]


def compiled(name: str, parameters: Any) -> Any:
    shape = dialects()[name]().calls_format({"f": parameters}, False)
    return compile_spec(COMPILER, "structural_tag", json.dumps({"type": "structural_tag", "format": shape}))


def number(text: str) -> float | int:
    """As a float; beyond all of them a large integer of its sign, which validators compare."""
    value = float(text)
    large = -(10**400) if value < 0 else 10**400
    return value if math.isfinite(value) else large


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_schemas", [25, pytest.param(1500, marks=pytest.mark.full)])
def test_arguments_of_random_tools_are_valid(name: str, num_schemas: int) -> None:
    num_answers = 0
    for seed in range(num_schemas):
        rng = random.Random(seed)
        properties = {key: schema(rng, 1) for key in "abc" if rng.random() < 0.6}
        given = {"type": "object", "properties": properties, "required": rng.choice([[], ["a"], ["a", "d"]])}
        given |= {"$defs": document(rng)["$defs"]}
        if rng.random() < 0.3:
            given |= rng.choice([{"additionalProperties": False}, {"maxProperties": 1}, {"minProperties": 2}])
        try:
            grammar = compiled(name, given)
        except (ValueError, RuntimeError):  # the gate's, or xgrammar's
            continue
        for _ in range(4):
            text = sample(grammar, rng, 500)
            if text is None or "\ufffd" in text:
                continue
            (call,) = read(dialects()[name](), [text], {"f": given}, "closed", constraint="whole").calls
            num_answers += 1
            arguments = json.loads(call[1], parse_float=number, parse_constant=refuse)
            assert jsonschema.Draft202012Validator(given).is_valid(arguments), (seed, text, given)
    assert num_answers >= num_schemas // 5


TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "n"],
}


@pytest.mark.parametrize("name", FORMS)
def test_a_tool_whose_schema_contains_itself(name: str) -> None:
    """By a reference to the root, which has another place in the schema of one value."""
    rng, grammar = random.Random(0), compiled(name, TREE)
    texts = [text for _ in range(20) if (text := sample(grammar, rng, 500)) is not None]
    assert texts
    for text in texts:
        (call,) = read(dialects()[name](), [text], {"f": TREE}, "closed", constraint="whole").calls
        assert jsonschema.Draft202012Validator(TREE).is_valid(json.loads(call[1]))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "glm47", "minimax", "deepseek_v32"])
@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"properties": {}, "maxProperties": 1}, "#/maxProperties"),
        ({"properties": {"a": {"anyOf": [{"type": "integer"}], "type": "string"}}}, "#/properties/a/anyOf"),
        ({"properties": {"a": {"enum": ["x"], "minLength": 2}}}, "#/properties/a/enum"),
        ({"properties": {"a": {"minimum": 2}}}, "#/properties/a/minimum"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "#/properties/a/not"),
        ({"properties": {"a": {"$ref": "#", "maxLength": 2}}}, "#/properties/a/$ref"),
        ({"properties": {"a": {"$ref": "#name"}}}, "#/properties/a/$ref"),
        ({"properties": {"a>": {}}}, "#/properties/a>"),
    ],
)  # fmt: skip
def test_what_tags_cannot_hold_is_refused_by_its_path(name: str, given: Any, start: str) -> None:
    with pytest.raises(ValueError, match=f"^{start.replace('$', '[$]')}"):
        compiled(name, {"type": "object", **given})
