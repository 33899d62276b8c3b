"""Reasoning and tool calls, however the text is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from diptych.shared.server.api.chat import ChatChoice
from diptych.shared.server.api.logprob_fields import TokenTexts
from diptych.shared.server.api.parsers import ReasoningParser, ToolParser
from diptych.shared.server.api.protocol import ChatRequest
from diptych.shared.server.engine.engine_client import Delta
from diptych.shared.server.engine.messages import Finish
from tests.properties import given, st

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "}\\"{ü"}}\n</tool_call>'
SWAPPED = '<tool_call>{"arguments": {"city": "Bergen"}, "name": "weather"}</tool_call>'


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def read_tools(parts: list[str], max_calls: int | None = None) -> tuple[str, list[dict[str, str]]]:
    """Content and calls; asserts that a call's id and name come once and first."""
    parser, content, calls = ToolParser(max_calls=max_calls), "", []
    for text, deltas in [*map(parser.feed, parts), parser.finish()]:
        content += text
        for delta in deltas:
            if delta.index == len(calls):
                assert delta.name is not None
                assert delta.call_id is not None
                calls.append({"name": delta.name, "arguments": ""})
            else:
                assert delta.name is None
                assert delta.call_id is None
            calls[delta.index]["arguments"] += delta.arguments
    return content, calls


def read_reasoning(parts: list[str], starts_inside: bool) -> dict[str, str]:
    parser, found = ReasoningParser(starts_inside), {"content": "", "reasoning": ""}
    for part in [*map(parser.feed, parts), parser.finish()]:
        for piece in part:
            found[piece.kind] += piece.text
    return found


@given(st.lists(st.integers(0, 300), max_size=20))
def test_two_calls_and_prose(cuts: list[int]) -> None:
    content, calls = read_tools(pieces(f"Let me see. {CALL}\n{CALL} Done < 3.", cuts))
    assert content == "Let me see.  Done < 3."
    assert [call["name"] for call in calls] == ["add", "add"]
    for call in calls:
        assert json.loads(call["arguments"]) == {"a": 12, "b": '}"{ü'}


@given(st.lists(st.integers(0, 300), max_size=20), st.sampled_from(["", "\n", "</tool_call>"]))
def test_calls_beyond_the_limit_are_dropped(cuts: list[int], end: str) -> None:
    text = f"A {CALL}\n{SWAPPED}{CALL} B<tool_call>{CALL[11:-12]}{end}"
    content, calls = read_tools(pieces(text, cuts), max_calls=1)
    assert content == "A  B"
    assert [json.loads(call["arguments"]) for call in calls] == [{"a": 12, "b": '}"{ü'}]


@pytest.mark.parametrize(("is_parallel", "num_calls"), [(True, 2), (False, 1)])
def test_a_request_without_parallel_calls_gets_one(is_parallel: bool, num_calls: int) -> None:
    messages = [{"role": "user", "content": "a"}]
    tools = [{"function": {"name": name}} for name in ("add", "weather")]
    body = ChatRequest(messages=messages, tools=tools, parallel_tool_calls=is_parallel)
    choice = ChatChoice(0, body, False, TokenTexts(None, as_ids=False))
    deltas = choice.deltas(Delta(text=CALL + SWAPPED, finish=Finish(kind="stop")))
    indices = [entry["index"] for delta in deltas for entry in delta.get("tool_calls", ())]
    assert {*indices} == {*range(num_calls)}
    assert choice.finish_reason(Finish(kind="stop")) == "tool_calls"


@given(st.lists(st.integers(0, 100), max_size=10))
def test_markers_within_strings_are_text(cuts: list[int]) -> None:
    arguments = {"x": 'see </tool_call> \\"</tool_call>\\ <tool_call>', "y": 1}
    call = f'<tool_call>{{"name": "f", "arguments": {json.dumps(arguments)}}}</tool_call>'
    content, calls = read_tools(pieces(f"A {call}{SWAPPED} B", cuts))
    assert content == "A  B"
    assert [json.loads(call["arguments"]) for call in calls] == [arguments, {"city": "Bergen"}]


@given(st.lists(st.integers(0, 100), max_size=10))
def test_keys_in_another_order(cuts: list[int]) -> None:
    content, calls = read_tools(pieces(SWAPPED, cuts))
    assert content == ""
    assert calls == [{"name": "weather", "arguments": '{"city": "Bergen"}'}]


@pytest.mark.parametrize(
    "text", ["<tool_call>nothing</tool_call>", "<tool_call>{", "a <tool_cal", "<tool_call>[1]</tool_call> b"]
)
def test_what_is_no_call_stays_content(text: str) -> None:
    for cut in range(len(text)):
        assert read_tools([text[:cut], text[cut:]]) == (text, [])


@given(st.lists(st.integers(0, 100), max_size=10))
def test_reasoning_then_content(cuts: list[int]) -> None:
    parts = pieces("<think>\nTwelve < thirty.\n</think>\n\nIt is 42.", cuts)
    assert read_reasoning(parts, False) == {"reasoning": "Twelve < thirty.\n", "content": "It is 42."}


@given(st.lists(st.integers(0, 100), max_size=10))
def test_the_template_opened_the_reasoning(cuts: list[int]) -> None:
    parts = pieces("Hm.</think>Yes", cuts)
    assert read_reasoning(parts, True) == {"reasoning": "Hm.", "content": "Yes"}


@pytest.mark.parametrize("text", ["No marker.", " <thin", "a <think>b</think>", ""])
def test_without_reasoning_all_is_content(text: str) -> None:
    assert read_reasoning(list(text), False) == {"reasoning": "", "content": text}


def test_reasoning_cut_off_by_length() -> None:
    assert read_reasoning(["<think>", "a</th"], False) == {"reasoning": "a</th", "content": ""}
