"""Structured output over HTTP: OpenAI's fields and those of other servers, tool calls, hostile grammars."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from tests.server.running import RunningServer, openai_client

if TYPE_CHECKING:
    import openai

ASK = [{"role": "user", "content": "Tell me about Mara."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": PERSON}},
    {"type": "function", "function": {"name": "stop", "description": "End it."}},
]
SLOW = "(a|b)*" * 8000


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai_client(server)


def chat(client: openai.OpenAI, **body: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny-dense", "messages": ASK, "max_tokens": 60, "temperature": 0, **body}
    )


def test_json_schema(client: openai.OpenAI) -> None:
    answer = chat(client, response_format=AS_SCHEMA, temperature=1.2, seed=4, n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)


def test_json_object_and_text(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    plain = chat(client, response_format={"type": "text"}).choices[0].message.content
    assert plain == chat(client).choices[0].message.content


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    whole = chat(client, response_format=AS_SCHEMA).choices[0].message.content
    stream = chat(client, response_format=AS_SCHEMA, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-\d{2}"}}, r"\d{3}-\d{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" "b"'}}, "ab"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"guided_json": {"enum": ["x"]}}, '"x"'),
        ({"guided_json": '{"enum": ["y"]}'}, '"y"'),
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'root ::= "q"'}, "q"),
        ({"regex": "z{3}"}, "zzz"),
        ({"ebnf": 'root ::= "e"'}, "e"),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_other_names(client: openai.OpenAI, body: dict[str, Any], pattern: str, endpoint: str) -> None:
    if endpoint == "chat":
        text = chat(client, extra_body=body).choices[0].message.content
    else:
        answer = client.completions.create(
            model="tiny-dense", prompt="A", max_tokens=60, temperature=0, extra_body=body
        )
        text = answer.choices[0].text
    assert re.fullmatch(pattern, text), text


def test_native_generate(server: RunningServer) -> None:
    params = {"max_new_tokens": 60, "temperature": 0, "json_schema": PERSON}
    answer = server.post("/generate", {"text": "Mara is", "sampling_params": params})
    jsonschema.validate(json.loads(answer["text"]), PERSON)
    answer = server.post("/generate", {"text": "A", "sampling_params": {"choice": ["yes", "no"]}})
    assert answer["text"] in ("yes", "no")


def test_a_required_tool_is_called(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        answer = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=120, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.function.name in ("look_up", "stop")
        if call.function.name == "look_up":
            jsonschema.validate(json.loads(call.function.arguments), PERSON)
    stream = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=120, stream=True)
    pieces = [piece for chunk in stream for piece in chunk.choices[0].delta.tool_calls or ()]
    assert pieces[0].function.name == "look_up"
    jsonschema.validate(json.loads("".join(piece.function.arguments for piece in pieces)), PERSON)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": AS_SCHEMA, "regex": "a"}, "only one constraint"),
        ({"guided_regex": "a", "structured_outputs": {"choice": ["b"]}}, "only one constraint"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp"),
        ({"regex": "(a"}, "cannot be compiled"),
        ({"regex": "(" * 100}, "nested"),
        ({"ebnf": "root = 1"}, "cannot be compiled"),
        ({"guided_json": {"type": "colour"}}, "cannot be compiled"),
        ({"guided_json": {"$ref": "file:///etc/passwd"}}, "leads outside"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "not in tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"guided_choice": []}, "guided_choice: "),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: "),
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "#/properties/a/not: "),
        ({"regex": "a(?=b)"}, "no lookaround"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
                "tool_choice": "required",
            },
            "refers to itself",
        ),
    ],
)
def test_what_is_refused(server: RunningServer, body: dict[str, Any], said: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post("/v1/chat/completions", {"model": "tiny-dense", "messages": ASK, **body})
    assert caught.value.code == 400
    assert said in caught.value.read().decode()


def test_a_slow_grammar_delays_no_other_request(server: RunningServer, client: openai.OpenAI) -> None:
    """Its client leaves while it is compiled: so does the request."""
    body = json.dumps({"model": "tiny-dense", "messages": ASK, "regex": SLOW}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait_for_grammar_queue(server, 1)
        for _ in range(5):
            assert chat(client, max_tokens=4).usage.completion_tokens == 4
        assert server.get("/server_info")["load"]["num_waiting_for_grammar"] == 1
    wait_for_grammar_queue(server, 0, timeout=8.0)
    server.wait_idle()


def wait_for_grammar_queue(server: RunningServer, length: int, timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while server.get("/server_info")["load"]["num_waiting_for_grammar"] != length:
        assert time.monotonic() < end, f"the length of the queue is never {length}"
        time.sleep(0.02)
