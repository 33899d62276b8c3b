"""Tools beside a response_format, markers in messages, and answers that continue a message."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

if find_spec("xgrammar") is None:
    pytest.skip("needs xgrammar", allow_module_level=True)

from tests.server.in_process import client_of, make_app
from tests.server.running import RunningServer
from tests.server.test_faults import post

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "What is 12 + 30?"}]
ARGUMENTS = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def asked(path: str, choice: str) -> dict[str, Any]:
    """A request with a tool and a format."""
    if path == CHAT:
        function = {"name": "f", "parameters": ARGUMENTS}
        return {
            "messages": USER,
            "max_tokens": 100,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": choice,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        }
    if path == RESPONSES:
        return {
            "input": USER[0]["content"],
            "max_output_tokens": 100,
            "tools": [{"type": "function", "name": "f", "parameters": ARGUMENTS}],
            "tool_choice": choice,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        }
    return {
        "messages": USER,
        "max_tokens": 100,
        "tools": [{"name": "f", "input_schema": ARGUMENTS}],
        "tool_choice": {"type": {"required": "any"}.get(choice, choice)},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }


def answered(path: str, body: dict[str, Any]) -> tuple[str, Any]:
    """ "call" and its arguments, or "text" and its JSON."""
    if path == CHAT:
        message = body["choices"][0]["message"]
        if message.get("tool_calls"):
            assert message["content"] is None
            return "call", json.loads(message["tool_calls"][0]["function"]["arguments"])
        return "text", json.loads(message["content"])
    item = body["output" if path == RESPONSES else "content"][0]
    if item["type"] in ("function_call", "tool_use"):
        return "call", json.loads(item["arguments"]) if path == RESPONSES else item["input"]
    return "text", json.loads(item["content"][0]["text"] if path == RESPONSES else item["text"])


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_auto_calls_or_answers_by_the_schema(server: RunningServer, path: str) -> None:
    kinds = set()
    for seed in range(6):
        temperature = 1.0 if path != CHAT else 4.0
        extra = {"seed": seed} if path == CHAT else {}
        status, body = post(server, path, {**asked(path, "auto"), "temperature": temperature, **extra})
        assert status == 200, body
        kind, value = answered(path, body)
        kinds.add(kind)
        assert value.keys() == ({"n"} if kind == "call" else {"age"})
    assert kinds <= {"call", "text"}


@pytest.mark.parametrize("first", ["<", "{"])
def test_both_are_possible(server: RunningServer, first: str) -> None:
    _, ids = post(server, "/tokenize", {"prompt": first, "add_special_tokens": False})
    bias = {str(ids["tokens"][0]): 100}
    body = {**asked(CHAT, "auto"), "temperature": 0, "logit_bias": bias, "max_tokens": 1}
    status, answer = post(server, CHAT, {**body, "logprobs": True})
    assert status == 200
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == first


def strict(path: str) -> dict[str, Any]:
    """A request with a strict tool and without a format."""
    formats = ("response_format", "text", "output_config")
    body = {name: value for name, value in asked(path, "auto").items() if name not in formats}
    (body["tools"][0]["function"] if path == CHAT else body["tools"][0])["strict"] = True
    return body


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_strict_tools_of_a_model_without_calls_constrain_nothing(path: str) -> None:
    app, engine = make_app(tool_parser="none")

    async def ask(body: dict[str, Any]) -> httpx.Response:
        async with client_of(app) as client:
            return await client.post(path, json=body)

    answer = asyncio.run(ask(strict(path)))
    assert answer.status_code == 200, answer.text
    assert engine.sent[0].params.structural_tag is None
    choice = {"type": "any"} if path == MESSAGES else "required"
    assert asyncio.run(ask({**strict(path), "tool_choice": choice})).status_code == 400


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_strict_tools_leave_the_answer_free(server: RunningServer, path: str) -> None:
    status, answer = post(server, path, {**strict(path), "temperature": 0})
    assert status == 200, answer
    assert "42" in json.dumps(answer)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_required_call_ignores_the_format(server: RunningServer, path: str) -> None:
    status, body = post(server, path, asked(path, "required"))
    assert status == 200, body
    kind, value = answered(path, body)
    assert kind == "call"
    assert value["n"] in (1, 2)


@pytest.mark.parametrize("text", ["<think>", "</think>", "a <think> b", "<|im_end|>", "<tool_call>"])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_markers_in_messages_leave_the_format(server: RunningServer, role: str, text: str) -> None:
    body = {**asked(CHAT, "none"), "messages": [{"role": role, "content": text}, *USER]}
    status, answer = post(server, CHAT, body)
    assert status == 200, answer
    assert answered(CHAT, answer)[1].keys() == {"age"}
    assert "reasoning_content" not in answer["choices"][0]["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_last_message_of_the_assistant_is_continued(server: RunningServer, path: str) -> None:
    begun = [*USER, {"role": "assistant", "content": "12 + 30 ="}]
    prompt = f"<|im_start|>user\n{USER[0]['content']}<|im_end|>\n<|im_start|>assistant\n12 + 30 ="
    limits = {"max_tokens": 8, "temperature": 0}
    extra = {"continue_final_message": True} if path == CHAT else {}
    _, expected = post(server, "/v1/completions", {"prompt": prompt, **limits})
    status, answer = post(server, path, {"messages": begun, **limits, **extra})
    assert status == 200, answer
    text = answer["content"][0]["text"] if path == MESSAGES else answer["choices"][0]["message"]["content"]
    assert text == expected["choices"][0]["text"]
    if path == CHAT:
        _, echoed = post(server, path, {"messages": begun, **limits, **extra, "echo": True})
        assert echoed["choices"][0]["message"]["content"] == "12 + 30 =" + text


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": "a"}, "last message of the assistant"),
        ({"role": "assistant", "content": ""}, "last message of the assistant"),
        (
            {
                "role": "assistant",
                "content": "a",
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
            "without calls",
        ),
    ],
)
def test_what_cannot_be_continued(server: RunningServer, message: dict[str, Any], said: str) -> None:
    status, answer = post(server, CHAT, {"messages": [*USER, message], "continue_final_message": True})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert said in answer["error"]["message"]


def test_an_answer_continues_or_begins(server: RunningServer) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    messages = [*USER, {"role": "assistant", "content": "12 + 30 ="}]
    status, answer = post(server, CHAT, {"messages": messages, **both})
    assert (status, answer["error"]["param"]) == (400, "add_generation_prompt")


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", '"a"'])
def test_arguments_in_the_history_are_objects(server: RunningServer, arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    status, answer = post(server, CHAT, {"messages": [*messages, *USER]})
    assert status == 400
    assert "message 1: the arguments of the call of 'f' are no JSON object" in answer["error"]["message"]


def test_a_result_has_a_call(server: RunningServer) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    status, answer = post(server, CHAT, {"messages": [*USER, result]})
    assert status == 400
    assert (
        "message 1 is the result of call 'c', which no message before it makes" in answer["error"]["message"]
    )
