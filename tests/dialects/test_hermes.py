"""Reasoning, blocks of JSON calls, and what is none."""

from __future__ import annotations

import json

import pytest

from diptych.shared.dialects.hermes import Hermes
from diptych.shared.tools.conformance.oracles.read_answers import pieces, read
from tests.properties import given, st

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "}\\"{ü"}}\n</tool_call>'
SWAPPED = '<tool_call>{"arguments": {"city": "Bergen"}, "name": "weather"}</tool_call>'
ADD = ("add", '{"a": 12, "b": "}\\"{ü"}')
WEATHER = ("weather", '{"city": "Bergen"}')
CUTS = st.lists(st.integers(0, 300), max_size=20)


@given(CUTS)
def test_two_calls_and_prose(cuts: list[int]) -> None:
    found = read(Hermes(), pieces(f"Let me see. {CALL}\n{CALL} Done < 3.\n{CALL}\n", cuts))
    assert found == ("Let me see. Done < 3.", "", [ADD] * 3)


@given(CUTS, st.sampled_from(["", "\n", "</tool_call>"]))
def test_calls_beyond_the_limit_are_dropped(cuts: list[int], end: str) -> None:
    text = f"A {CALL}\n{SWAPPED}{CALL} B<tool_call>{CALL[11:-12]}{end}"
    assert read(Hermes(), pieces(text, cuts), max_calls=1) == ("A B", "", [ADD])


@given(CUTS)
def test_markers_within_strings_are_text(cuts: list[int]) -> None:
    arguments = json.dumps({"x": 'see </tool_call> \\"</tool_call>\\ <tool_call>', "y": 1})
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    found = read(Hermes(), pieces(f"A {call}{SWAPPED} B", cuts))
    assert found == ("A B", "", [("f", arguments), WEATHER])


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (f"{CALL[12:-13]}{SWAPPED[11:-12]}", [ADD, WEATHER]),  # two objects in one block
        (f"[{CALL[12:-13]}, {SWAPPED[11:-12]}]", [ADD, WEATHER]),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', [("f", '{"a": "\\n"}')]),
        ('{"name": "f", "arguments": "no JSON"}', [("f", '"no JSON"')]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"name": "f"}', [("f", "{}")]),
        ('{"id": 3, "name": "f", "parameters": {"a": 1}, "x": [1]}', [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}')]),  # a brace is missing
    ],
)
def test_forms_of_a_block(body: str, calls: list[tuple[str, str]]) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    for cut in range(len(text)):
        assert read(Hermes(), [text[:cut], text[cut:]]) == ("", "", calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nothing</tool_call>",
        "<tool_call>{",
        "a <tool_cal",
        "<tool_call>[1]</tool_call> b",
        "<tool_call></tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>" + '{"name": "' + "a" * 9000,
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    for cut in range(0, len(text), 1 + len(text) // 100):
        assert read(Hermes(), [text[:cut], text[cut:]]) == (text, "", [])


def test_an_unfinished_beginning_that_was_cut_off_is_left_out() -> None:
    assert read(Hermes(), ['So: <tool_call>{"na'], is_cut=True) == ("So:", "", [])


@given(CUTS)
def test_reasoning_then_content(cuts: list[int]) -> None:
    parts = pieces("<think>\nTwelve < thirty.\n</think>\n\nIt is 42.", cuts)
    assert read(Hermes(), parts) == ("It is 42.", "Twelve < thirty.\n", [])


@given(CUTS)
def test_the_template_opened_the_reasoning(cuts: list[int]) -> None:
    assert read(Hermes(), pieces("Hm.</think>Yes", cuts), state="open") == ("Yes", "Hm.", [])


@given(CUTS)
def test_a_call_ends_reasoning_and_a_mention_does_not(cuts: list[int]) -> None:
    parts = pieces(f"I may write <tool_call> here. {CALL} Done", cuts)
    found = read(Hermes(), parts, state="open")
    assert found == (" Done", "I may write <tool_call> here. ", [ADD])


@pytest.mark.parametrize("text", ["No marker.", " <thin", "a <think>b</think>", "", "a <tool_call> b"])
@pytest.mark.parametrize("state", ["may_open", "closed"])
def test_without_reasoning_and_tools_all_is_content(text: str, state: str) -> None:
    assert read(Hermes(), list(text), {}, state=state) == (text, "", [])  # type: ignore[arg-type]


def test_reasoning_cut_off_by_length() -> None:
    assert read(Hermes(), ["<think>", "a</th"]) == ("", "a</th", [])
