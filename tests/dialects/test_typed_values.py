"""Text between tags as JSON by the tool's schema, and the dialect of Qwen3-Coder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.shared.dialects.parts.answer_parser import AnswerParser
from diptych.shared.dialects.parts.choose import tool_parsers
from diptych.shared.dialects.parts.typed_values import as_json, types_of
from diptych.shared.dialects.qwen3_coder import Qwen3Coder
from diptych.shared.tools.conformance.oracles.read_answers import read

ANY: frozenset[str] = frozenset()
SCHEMA: dict[str, Any] = {
    "$defs": {
        "n": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/s"}]},
        "s": {"type": ["string", "null"]},
    },
    "properties": {
        "union": {"$ref": "#/$defs/n"},
        "chosen": {"enum": ["a", 3, None]},
        "const": {"const": True},
        "free": {"description": "anything"},
        "loop": {"$ref": "#/properties/loop"},
        "lost": {"$ref": "#/$defs/none/at/all"},
    },
}


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("123", {"string"}, '"123"'),
        ("null", {"string"}, '"null"'),
        ("123", {"integer"}, "123"),
        ("3.0", {"integer"}, "3"),
        ("3.5", {"integer"}, '"3.5"'),
        (" -2.5e3 ", {"number"}, "-2.5e3"),
        ("NaN", {"number"}, '"NaN"'),
        ("007", {"integer"}, '"007"'),
        ("True", {"boolean"}, "true"),
        ("false", {"boolean"}, "false"),
        ("maybe", {"boolean"}, '"maybe"'),
        ("None", {"null", "string"}, "null"),
        ("123", {"integer", "string"}, "123"),
        ('{"a": [1]}', {"object"}, '{"a": [1]}'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[1", {"array"}, '"[1"'),
        ('a "b"\n', {"string"}, '"a \\"b\\"\\n"'),
        ("ü", ANY, '"ü"'),
        ("[1, 2]", ANY, "[1, 2]"),
        ("5", ANY, "5"),
        ("", ANY, '""'),
    ],
)
def test_a_text_as_json(text: str, types: set[str], expected: str) -> None:
    assert as_json(text, frozenset(types)) == expected


def test_types_through_references_and_unions() -> None:
    found = {name: types_of(SCHEMA, name) for name in [*SCHEMA["properties"], "unknown"]}
    assert found["union"] == {"integer", "string", "null"}
    assert found["chosen"] == {"string", "integer", "null"}
    assert found["const"] == {"boolean"}
    assert found["free"] == found["loop"] == found["lost"] == found["unknown"] == ANY
    assert types_of(True, "a") == types_of(None, "a") == types_of({"properties": 3}, "a") == ANY


CALL = "<function=f>\n<parameter=a>\nx </tool_call> y\n\n</parameter>\n</function>"
TOOLS = {"f": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}
READ = ("f", '{"a": "x </tool_call> y\\n"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Hm.\n<tool_call>\n{CALL}\n</tool_call>\nSo.", "Hm.\nSo.", [READ]),
        (f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", [READ, READ]),  # two calls in one block
        (f"{CALL}\n</tool_call>", "", [READ]),  # the model has left the first marker out
        (f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>", "", [READ, READ]),
        ("<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
        ("<tool_call><function=f><parameter=n>3</parameter></tool_call> b", " b", [("f", '{"n": 3}')]),
        ("Write <function=name> here.", "Write <function=name> here.", []),
        ("<tool_call>f()</tool_call>", "<tool_call>f()</tool_call>", []),
    ],
)
def test_forms_of_a_block(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cut in range(len(text)):
        assert read(Qwen3Coder(), [text[:cut], text[cut:]], TOOLS) == (content, "", calls)


@pytest.mark.parametrize("value", ["[" + "1, " * 30_000 + "2]", "x" * 70_000])
def test_a_long_value_is_read_alike_in_pieces(value: str) -> None:
    text = f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>"
    tools = {"f": {"properties": {"a": {"type": ["array", "string"]}}}}
    expected = value if value.startswith("[") else f'"{value}"'
    for size in (len(text), 1, 1000):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(Qwen3Coder(), parts, tools).calls == [("f", f'{{"a": {expected}}}')]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "\\ud800", "arguments": {"a": "\\ud800"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": "{\\"a\\": \\"\\ud800\\"}", "name": "f"}\n</tool_call>'),
        ("pythonic", "[f(a='\\ud800', b={'\\ud800': 1})]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "id": "\\udfff", "arguments": {}}]'),
    ],
)
def test_half_a_surrogate_pair_is_no_text(name: str, text: str) -> None:
    parser = AnswerParser(tool_parsers()[name](), {"f": True}, "closed")
    events = [*parser.feed(text), *parser.finish()]
    assert parser.num_calls == 1
    json.dumps(events, ensure_ascii=False).encode()
