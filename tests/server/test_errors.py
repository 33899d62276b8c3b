"""`param` of an error names the field of the body that is wrong, and no message has names of our classes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.running import RunningServer
from tests.server.test_faults import SUM, post

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, NATIVE, EMBEDDINGS = "/v1/messages", "/generate", "/v1/embeddings"
LONG = "one two three " * 3000
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SUM},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": SUM, "max_tokens": 5},
    NATIVE: {"text": "a"},
    EMBEDDINGS: {"input": "a"},
}
PART = {"type": "text", "text": "a"}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [*SUM, {"role": "user", "content": content}]}


def check(server: RunningServer, path: str, body: dict[str, Any], param: str | None, said: str) -> None:
    status, answer = post(server, path, {**GOOD[path], **body})
    error = answer["error"]
    assert (status, error["param"]) == (400, param), error
    assert said in error["message"]
    for private in ("TextPart", "ToolChoice", "_type_of", "Input tag", "instance of", "list["):
        assert private not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "prompt: Input should be a valid string"),
        (COMPLETIONS, {"stream_options": 3}, "stream_options", "should be an object"),
        (COMPLETIONS, {"stream_options": {"foo": 3}}, "stream_options.foo", "unknown field"),
        (COMPLETIONS, {"stop": ["a", 3]}, "stop.1", "valid string"),
        (COMPLETIONS, {"temp": 3}, "temp", "unknown field 'temp'"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role", "Field required"),
        (CHAT, {"tool_choice": {"type": "x", "function": {"name": "f"}}}, "tool_choice.type", "'function'"),
        (CHAT, {"tool_choice": "x"}, "tool_choice", "'none', 'auto' or 'required'"),
        (CHAT, user([{"type": "image", "text": "a"}]), "messages.1.content.0.type", "Input should be 'text'"),
        (CHAT, user([PART, {**PART, "foo": 1}]), "messages.1.content.1.foo", "unknown field"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"foo": 1}}},
            "response_format.json_schema.foo",
            "unknown field",
        ),
        (RESPONSES, {"input": []}, "input", "input: List should have at least 1 item"),
        (RESPONSES, {"input": [{"role": "user", "content": "a", "foo": 1}]}, "input.0.foo", "unknown field"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input.0", "type 'computer_call' is none of"),
        (RESPONSES, {"input": [{"type": None}]}, "input.0", "an object with a type"),
        (MESSAGES, user([{**PART, "foo": 1}]), "messages.1.content.0.foo", "unknown field"),
        (MESSAGES, user([{"type": "text", "text": 1}]), "messages.1.content.0.text", "valid string"),
        (MESSAGES, user([{"type": "text"}]), "messages.1.content.0.text", "Field required"),
        (MESSAGES, user([{"type": "image"}]), "messages.1.content.0.source", "Field required"),
        (NATIVE, {"sampling_params": {"foo": 1}}, "sampling_params.foo", "unknown field"),
    ],
)
def test_bodies_of_another_form(
    server: RunningServer, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    check(server, path, body, param, said)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt", "tokens"),
        (COMPLETIONS, {"prompt": "a" * 10**6}, "prompt", "characters"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt", "token ids must be in"),
        (COMPLETIONS, {"max_tokens": 10**6}, "max_tokens", "maximum context length"),
        (COMPLETIONS, {"top_k": -5}, "top_k", "top_k must be"),
        (COMPLETIONS, {"stop": "a" * 600}, "stop", "stop "),
        (COMPLETIONS, {"stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary"),
        (COMPLETIONS, {"logit_bias": {"1000000": 1}}, "logit_bias", "vocabulary"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", "tokens"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens", "maximum context length"),
        (CHAT, {"max_tokens": 10**6}, "max_tokens", "maximum context length"),
        (RESPONSES, {"input": LONG}, "input", "tokens"),
        (RESPONSES, {"max_output_tokens": 10**6}, "max_output_tokens", "maximum context length"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format", "schema"),
        (MESSAGES, {"max_tokens": 10**6}, "max_tokens", "exceed context limit"),
        (MESSAGES, {"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
        (NATIVE, {"text": LONG}, "text", "tokens"),
        (NATIVE, {"text": None, "input_ids": []}, "input_ids", "empty"),
        (NATIVE, {"sampling_params": {"top_p": 3.0}}, "sampling_params.top_p", "top_p must be"),
        (NATIVE, {"sampling_params": {"stop_token_ids": [10**6]}}, "sampling_params.stop_token_ids", "vocab"),
        (NATIVE, {"top_logprobs_num": 3}, "top_logprobs_num", "needs return_logprob"),
        (EMBEDDINGS, {"input": LONG}, "input", "tokens"),
    ],
)
def test_values_out_of_range(
    server: RunningServer, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    check(server, path, body, param, said)


def test_a_long_name_is_cut(server: RunningServer) -> None:
    error = post(server, COMPLETIONS, {**GOOD[COMPLETIONS], "a" * 10**6: 1})[1]["error"]
    assert error["param"] == "a" * 200
    assert error["message"].startswith("unknown field 'aaa")
