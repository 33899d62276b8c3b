"""Calls that no marker announces: JSON of Llama 3, and Python."""

from __future__ import annotations

import json

import pytest

from diptych.shared.dialects.llama3 import Llama3
from diptych.shared.dialects.pythonic import Pythonic
from diptych.shared.tools.conformance.oracles.read_answers import read

F = '{"name": "f", "parameters": {"a": 1}}'
READ = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (F, "", [READ]),
        (f" \n{F}\n", "", [READ]),
        (f"{F}; {F}", "", [READ, READ]),
        (f"{F}\n{F}", "", [READ, READ]),
        (f"<|python_tag|>{F}", "", [READ]),
        (f"Hm. <|python_tag|>{F}", "Hm.", [READ]),
        ('<|python_tag|>{"name": "unknown", "parameters": {}}', "", [("unknown", "{}")]),
        (f"The answer is {F}", f"The answer is {F}", []),
        ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ('{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        ('{"x": 1}', '{"x": 1}', []),
        ("{", "{", []),
        ("{}", "{}", []),
    ],
)
def test_json(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cut in range(len(text)):
        assert read(Llama3(), [text[:cut], text[cut:]]) == (content, "", calls)


def test_an_answer_that_is_json_but_no_call_streams() -> None:
    parts = ['{"city": ', '"' + "a" * 9000, '", "b": 1}']
    assert read(Llama3(), parts).content == "".join(parts)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[f(a=1)]", "", [("f", {"a": 1})]),
        ("[f(a=1), f()]", "", [("f", {"a": 1}), ("f", {})]),
        ("<|python_start|>[g(a='b')]<|python_end|> So.", " So.", [("g", {"a": "b"})]),
        (
            "[f(a='it\\'s', b=\"x\\n\\u00fc\\x41\\q\", c=[1, (2.5, -3)], d={'k': None, \"l\": True}, e=+4)]",
            "",
            [("f", {"a": "it's", "b": "x\nüA\\q", "c": [1, [2.5, -3]], "d": {"k": None, "l": True}, "e": 4})],
        ),
        ("[f( a = 1 , b = [ ] , )\n]", "", [("f", {"a": 1, "b": []})]),
        ("[link](http://f.no)", "[link](http://f.no)", []),
        ("[g(a=1)]", "[g(a=1)]", []),
        ("[1, 2]", "[1, 2]", []),
        ("See [f(a=1)]", "See [f(a=1)]", []),
    ],
)
def test_python(text: str, content: str, calls: list[tuple[str, dict]]) -> None:
    for cut in range(len(text)):
        found = read(Pythonic(), [text[:cut], text[cut:]])
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
        assert found.content == content


@pytest.mark.parametrize("value", ["g(1)", "'\\xZZ'", "{1: 2}", "[" * 40, ""])
def test_what_is_no_literal_ends_the_answer(value: str) -> None:
    assert read(Pythonic(), [f"[f(a={value})] more"]).calls[0][0] == "f"
    assert read(Pythonic(), [f"[f(a={value})] more"]).content == ""
