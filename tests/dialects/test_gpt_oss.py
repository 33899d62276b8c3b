"""Harmony messages as models write them, right and wrong."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.dialects.gpt_oss import GptOss
from diptych.shared.dialects.parts.choose import without_reasoning
from diptych.shared.tools.conformance.oracles.read_answers import read

THOUGHT = "<|channel|>analysis<|message|>The user says hi.<|end|><|start|>assistant"
CONTROLS = {marker: chr(0xFDD0 + i) for i, marker in enumerate(GptOss.markers)}
F = [("f", '{"a": 1}')]


def message(header: str, body: str = '{"a": 1}') -> str:
    return f"<|channel|>{header}<|message|>{body}"


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (THOUGHT + message("final", "Hello!"), "Hello!", "The user says hi.", []),
        (THOUGHT + message("commentary", "I look.") + "<|end|>", "I look.", "The user says hi.", []),
        (message("commentary to=functions.f <|constrain|>json"), "", "", F),
        (message("commentary to=functions.f<|constrain|>json") + "<|call|>", "", "", F),
        (" to=functions.f<|channel|>commentary json<|message|>" + '{"a": 1}', "", "", F),
        (THOUGHT + " to=functions.f" + message("commentary"), "", "The user says hi.", F),
        (message("analysis to=f json"), "", "", F),
        (message("commentary to=functions.f json", ' \n{"a": 1}\n'), "", "", F),
        (message("commentary to=functions.f code", "print(1)"), "", "", [("f", "")]),
        (message("commentary to=functions.f", '"{\\"a\\": 1}"'), "", "", F),
        (2 * (message("commentary to=functions.f") + "<|call|><|start|>assistant"), "", "", F + F),
        (message("odd", "What?"), "", "What?", []),
        (message("final", "no end") + message("analysis", "and on"), "no end", "and on", []),
        ("No header.", "No header.", "", []),
        ("<|start|>assistant" + message("final", "a"), "a", "", []),
        ("<|end|><|start|>assistant" + message("final <|constrain|>json", "{}"), "{}", "", []),
        ("<|channel|>final", "", "", []),
    ],
)
def test_messages(
    text: str, content: str, reasoning: str, calls: list[tuple[str, str]], is_special: bool
) -> None:
    controls = CONTROLS if is_special else {}
    for marker, char in controls.items():
        text = text.replace(marker, char)
    for cut in range(len(text)):
        found = read(GptOss(), [text[:cut], text[cut:]], controls=controls)
        assert found == (content, reasoning, calls)


def test_spelled_markers_are_text() -> None:
    text = f"{CONTROLS['<|channel|>']}final{CONTROLS['<|message|>']}Write <|call|> or <|end|>."
    assert read(GptOss(), list(text), controls=CONTROLS).content == "Write <|call|> or <|end|>."


def test_reasoning_that_is_not_separated_is_content() -> None:
    found = read(without_reasoning(GptOss()), [THOUGHT + message("final", "Hello!")])
    assert found == ("The user says hi.Hello!", "", [])


def test_history_has_one_call_in_a_message() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "function": {"name": name, "arguments": {}}}

    def result(name: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": name, "content": name}

    both = {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "r",
        "tool_calls": [call("a"), call("b")],
    }
    found = GptOss().history([both, result("b"), result("a"), {"role": "user", "content": "u"}])
    assert [m.get("tool_calls", [{"id": m["content"]}])[0]["id"] for m in found] == ["a", "a", "b", "b", "u"]
    assert found[0]["thinking"] == "r\nc"
    assert found[0]["content"] == found[2]["content"] == ""
    assert "thinking" not in found[2]
