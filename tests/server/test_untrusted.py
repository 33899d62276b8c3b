"""Requests that could harm the server: each is refused by name, and others are served."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from diptych.shared.server.api import encode_prompts as prompts_module
from diptych.shared.server.api.encode_prompts import decode_in_pieces
from tests.server.running import RunningServer
from tests.server.test_faults import SUM, assert_whole, connect, post
from tests.server.test_limits import ROUTES, num_live, send, status_of, wait_until
from tests.text.make import TEXTS, byte_level

HOSTILE_STOPS = (
    {"stop_regex": "a|" * 500_000 + "b"},
    {"stop_regex": "((a{1000}){1000}){1000}b"},
    {"stop_regex": ["(a{1000}){1000}b"] * 10},
    {"stop_regex": ["a"] * 17},
    {"stop": ["a"] * 17},
    {"stop": "a" * 513},
)
TEXT = {"prompt": "Count:", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def error_of(answer: tuple[int, dict[str, Any]]) -> tuple[int, str | None, str]:
    status, body = answer
    return status, body["error"]["param"], body["error"]["message"]


@pytest.mark.parametrize("stops", HOSTILE_STOPS, ids=[str(each)[:40] for each in HOSTILE_STOPS])
@pytest.mark.parametrize("route", ["chat", "completions", "native"])
def test_stops_have_limits_on_every_route(server: RunningServer, route: str, stops: dict[str, Any]) -> None:
    path, body = ROUTES[route]
    status, _, message = error_of(
        post(server, path, {**body, "sampling_params": stops} if route == "native" else {**body, **stops})
    )
    assert status == 400
    (name,) = stops
    assert message.startswith(f"{name} ")


def test_stop_sequences_have_the_same_limits(server: RunningServer) -> None:
    path, body = ROUTES["messages"]
    assert post(server, path, {**body, "stop_sequences": ["a"] * 17})[0] == 400


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "self", "tools", "tokenize", "add_generation_prompt", "max_chars"]
)
def test_reserved_names_are_no_template_arguments(server: RunningServer, name: str) -> None:
    body = {"messages": SUM, "chat_template_kwargs": {name: []}}
    status, param, message = error_of(post(server, "/v1/chat/completions", body))
    assert (status, param) == (400, "chat_template_kwargs")
    assert repr(name) in message


@pytest.mark.parametrize("value", [r'"\ud800"', r'["a", {"\udfff": 1}]', "1e999", "[[-1e999]]", "NaN"])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "stop"),
        ("/v1/completions", "cache_salt"),
        ("/v1/completions", "routing_key"),
        ("/v1/completions", "regex"),
        ("/v1/completions", "guided_choice"),
        ("/v1/completions", "stop_regex"),
        ("/v1/completions", "user"),
        ("/v1/completions", "metadata"),
        ("/v1/completions", "model"),
        ("/v1/chat/completions", "tools"),
        ("/v1/responses", "metadata"),
        ("/v1/messages", "system"),
        ("/v1/embeddings", "input"),
        ("/generate", "sampling_params"),
        ("/generate", "rid"),
        ("/tokenize", "prompt"),
        ("/abort_request", "rid"),
        ("/load_lora_adapter", "lora_path"),
    ],
)
def test_values_that_only_json_has(server: RunningServer, path: str, field: str, value: str) -> None:
    good = {"prompt": "a", "messages": SUM, "input": "a", "text": "a", "lora_name": "a", "max_tokens": 1}
    body = json.dumps(good)[:-1] + f', "{field}": {value}' + "}"
    status, param, message = error_of(post(server, path, body.encode()))
    assert (status, param) == (400, field)
    assert message == f"{field}: texts must be valid Unicode, and numbers finite"


def test_names_of_fields_are_valid_unicode(server: RunningServer) -> None:
    for body in (rb'{"prompt": "a", "\ud800": 1}', b'{"prompt": "\xed\xa0\x80"}'):
        status, param, message = error_of(post(server, "/v1/completions", body))
        assert status == 400
        assert param in (None, "prompt")
        assert "valid Unicode" in message
    assert_whole(server)


@pytest.mark.parametrize("text", [r'"\ud83d\ude42"', r'"a\u0000"', '"naïve 日"'])
def test_other_texts_are_valid(server: RunningServer, text: str) -> None:
    body = f'{{"prompt": {text}, "max_tokens": 1, "user": {text}, "top_p": 1e-2}}'
    assert post(server, "/v1/completions", body.encode())[0] == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/abort_request"])
@pytest.mark.parametrize("body", [b"{", b"[1]", b'"a"', b"[" * 100_000, b'{"mod": 1}'])
def test_malformed_administration(server: RunningServer, path: str, body: bytes) -> None:
    assert post(server, path, body)[0] == 400
    assert status_of(server, "/ready") == 200


@pytest.mark.parametrize("place", ["description", "arguments"])
def test_tools_count_before_they_are_tokenized(server: RunningServer, place: str) -> None:
    text = "a" * 7_000_000
    body: dict[str, Any] = {"messages": SUM, "tools": [TOOL]}
    if place == "description":
        body["tools"] = [{**TOOL, "function": {**TOOL["function"], "description": text}}]
    else:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        body["messages"] = [*SUM, {"role": "assistant", "tool_calls": [call]}, *SUM]
    status, param, message = error_of(post(server, "/v1/chat/completions", body))
    assert (status, param) == (400, "messages")
    assert "maximum context length" in message


def test_what_a_template_adds_counts_too(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": ""}] * 8000}
    status, _, message = error_of(post(server, "/v1/chat/completions", body))
    assert status == 400
    assert "maximum context length" in message


@pytest.mark.parametrize("depth", [100, 900])
def test_deep_values_are_no_500(server: RunningServer, depth: int) -> None:
    nested: Any = json.loads("[" * depth + "]" * depth)
    function = {"name": "f", "parameters": {"type": "object", "default": nested}}
    call = {"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}
    for body in (
        {"tools": [{"type": "function", "function": function}]},
        {"chat_template_kwargs": {"a": nested}},
        {"messages": [*SUM, {"role": "assistant", "tool_calls": [call]}, *SUM]},
    ):
        request = {"messages": SUM, "max_tokens": 1, **body}
        assert post(server, "/v1/chat/completions", request)[0] in (200, 400)
    assert_whole(server)


# ---- native fields ----


def test_native_top_logprobs(server: RunningServer) -> None:
    params = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True, "logit_bias": None}
    body = {"text": "Count:", "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    status, answer = post(server, "/generate", {**body, "top_logprobs_num": 3})
    assert status == 200
    meta = answer["meta_info"]
    for kind, count in (("output", 3), ("input", meta["prompt_tokens"])):
        tops, chosen = meta[f"{kind}_top_logprobs"], meta[f"{kind}_token_logprobs"]
        assert len(tops) == len(chosen) == count
        assert all(len(top) == 3 for top in tops[1:])
    assert [top[0][:2] for top in meta["output_top_logprobs"]] == [
        entry[:2] for entry in meta["output_token_logprobs"]
    ]
    assert meta["input_top_logprobs"][0] is None
    assert "output_top_logprobs" not in post(server, "/generate", body)[1]["meta_info"]
    status, _, message = error_of(post(server, "/generate", {"text": "a", "top_logprobs_num": 3}))
    assert (status, message) == (400, "top_logprobs_num=3 needs return_logprob=True")


def test_min_tokens_beyond_max_tokens(server: RunningServer) -> None:
    status, param, message = error_of(post(server, "/v1/completions", {**TEXT, "min_tokens": 3}))
    assert (status, param, message) == (400, "min_tokens", "min_tokens (3) exceeds max_tokens (2)")
    assert post(server, "/v1/completions", {**TEXT, "min_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    ("route", "choice"),
    [
        ("responses", "required"),
        ("responses", {"type": "function", "name": "f"}),
        ("messages", {"type": "any"}),
        ("messages", {"type": "tool", "name": "f"}),
        ("chat", "required"),
    ],
)
def test_a_choice_among_no_tools(server: RunningServer, route: str, choice: Any) -> None:
    path, body = ROUTES[route]
    for tools in ({}, {"tools": []}):
        answer = post(server, path, {**body, **tools, "tool_choice": choice})
        assert error_of(answer) == (400, "tool_choice", "tool_choice needs tools")


def test_a_choice_among_no_texts(server: RunningServer) -> None:
    status, param, _ = error_of(post(server, "/generate", {"text": "a", "sampling_params": {"choice": []}}))
    assert (status, param) == (400, "sampling_params.choice")


def test_abort_by_id(server: RunningServer) -> None:
    params = {"max_new_tokens": 1500, "ignore_eos": True, "n": 2}
    server.wait_idle()
    assert post(server, "/pause_generation", {"mode": "in_place"})[0] == 200
    try:
        named, other = (
            send(server, "/generate", {"text": "Count:", "sampling_params": params, "rid": rid})
            for rid in ("mine", "mine too")
        )
        wait_until(lambda: num_live(server) == 4)
        for rid, num_aborted in (("min", 0), ("mine", 2), ("unknown", 0)):
            status, answer = post(server, "/abort_request", {"rid": rid, "abort_all": False})
            assert (status, answer) == (200, {"num_aborted": num_aborted})
    finally:
        post(server, "/continue_generation", b"")
    named.settimeout(60)
    received = b""
    while b'"index":1' not in received:
        received += named.recv(2**16)
    assert received.startswith(b"HTTP/1.1 200")
    assert received.count(b'"finish_reason":{"type":"abort"') == 2
    assert num_live(server) == 2
    for connection in (named, other):
        connection.close()
    for body in ({}, {"rid": ""}, {"abort_all": False}):
        assert error_of(post(server, "/abort_request", body))[:2] == (400, "rid")
    assert_whole(server)


# ---- framing ----


def chunked(server: RunningServer, num_bytes: int, kind: str) -> tuple[int, dict[str, Any]]:
    """The answer to a chunked body, on a connection that is used again."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    piece = b'"' + b"a" * (2**20 - 1)
    pieces = (piece for _ in range(num_bytes // 2**20))
    connection.request("POST", "/v1/chat/completions", pieces, {"Content-Type": kind}, encode_chunked=True)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    return found


def test_chunked_bodies_have_the_same_limits(server: RunningServer) -> None:
    status, _, message = error_of(chunked(server, 20 * 2**20, "application/json"))
    assert (status, message) == (413, f"the body exceeds {8 * 2**20} bytes")
    assert error_of(chunked(server, 2**20, "text/plain"))[0] == 415
    assert error_of(chunked(server, 2**20, "application/json"))[0] == 400
    assert_whole(server)


# ---- detokenizing ----


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_tokens_are_the_whole_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(prompts_module, "DECODE_TOKENS", size)
        for end in range(len(ids) + 1):
            for skip in (False, True):
                expected = tokenizer.decode(ids[:end], skip_special_tokens=skip)
                assert decode_in_pieces(tokenizer, ids[:end], skip) == expected


def test_many_tokens(server: RunningServer) -> None:
    ids = post(server, "/tokenize", {"prompt": "one two three " * 1000})[1]["tokens"]
    status, answer = post(server, "/detokenize", {"tokens": ids})
    assert (status, answer["text"]) == (200, "one two three " * 1000)
    status, param, message = error_of(post(server, "/detokenize", {"tokens": [5] * 1_000_000}))
    assert (status, param) == (400, "tokens")
    assert "got 1000000" in message
    assert error_of(post(server, "/detokenize", {"tokens": [10**9]}))[:2] == (400, "tokens")


def test_a_stop_is_found_after_a_refused_one(server: RunningServer) -> None:
    """The engine still serves what is within the limits."""
    connect(server, {"messages": SUM, "stop_regex": ["("]}).close()
    status, answer = post(server, "/v1/completions", {"prompt": "Count from 3 to 9.", "stop_regex": [r"\d"]})
    assert status == 200
    assert not any(character.isdigit() for character in answer["choices"][0]["text"])
