"""Bodies of every size and form: none holds up the event loop, none makes a large error, none is a 500."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from diptych.shared.server.http import bodies
from diptych.shared.server.http.errors import ApiError
from diptych.shared.server.http.limits import MAX_BODY_BYTES, MAX_MARKS
from tests.properties import given, settings, st
from tests.server.in_process import FakeClient, Lag, client_of, make_app

MAX_LAG = 0.1
"""Seconds. The longest was 0.052, on slow cores beside two other workers; a body that is parsed again for
each of its parts takes seconds."""
MAX_ERROR_BYTES = 1024
HEADERS = {"Content-Type": "application/json"}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
USER = b'{"role":"user","content":"a"}'
CALL = b'{"id":"1","function":{"name":"f","arguments":"{}"}}'
TOOL = b'{"function":{"name":"f","parameters":{"a":{"b":[1,{}]}}}}'
ITEM = b'{"type":"function_call","call_id":"1","name":"f","arguments":"1"}'
RESULT = b'{"type":"tool_result","tool_use_id":"a","content":"b"}'
TURN = b'"messages":[' + USER + b"]"
FORMS = [  # path, what comes before, what is repeated, what comes behind
    (CHAT, b'{"messages":[', b"1", b"]}"),
    (CHAT, b'{"messages":[', b"{}", b"]}"),
    (CHAT, b'{"messages":[', USER, b"]}"),
    (CHAT, b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}"),
    (CHAT, b'{"messages":[{"role":"user","content":[', b"1", b"]}]}"),
    (CHAT, b'{"messages":[{"role":"assistant","tool_calls":[', CALL, b"]}]}"),
    (CHAT, b"{" + TURN + b',"tools":[', TOOL, b"]}"),
    (CHAT, b"{" + TURN + b',"metadata":{"a":[', b"1", b"]}}"),
    (CHAT, b"{" + TURN + b',"chat_template_kwargs":{"a":[', b'"a"', b"]}}"),
    (MESSAGES, b'{"max_tokens":1,"messages":[', b"1", b"]}"),
    (MESSAGES, b'{"max_tokens":1,"messages":[', USER, b"]}"),
    (MESSAGES, b'{"max_tokens":1,"messages":[{"role":"user","content":[', RESULT, b"]}]}"),
    (RESPONSES, b'{"input":[', b"1", b"]}"),
    (RESPONSES, b'{"input":[', USER, b"]}"),
    (RESPONSES, b'{"input":[', ITEM, b"]}"),
    (COMPLETIONS, b'{"prompt":[', b"5", b"]}"),
    (COMPLETIONS, b'{"n":256,"max_tokens":1,"prompt":[', b"5", b"]}"),
    (COMPLETIONS, b'{"prompt":[', b"[5]", b"]}"),
    (COMPLETIONS, b'{"prompt":[', b'"a"', b"]}"),
    (COMPLETIONS, b'{"prompt":[', b"null", b"]}"),
    (COMPLETIONS, b'{"prompt":[', b"0.1234567", b"]}"),
    (COMPLETIONS, b'{"prompt":[', b"1" * 4000, b"]}"),
    (COMPLETIONS, b'{"prompt":[', b"1" * 5000, b"]}"),
    (COMPLETIONS, b'{"prompt":"a","max_tokens":1,"user":"', b"one {two[ three: ", b'"}'),
    (COMPLETIONS, b'{"prompt":"a","max_tokens":1,"user":"', rb'\\\"\u00e9\n', b'"}'),
    (COMPLETIONS, b'{"prompt":"a","stop":[', b'"a"', b"]}"),
    (COMPLETIONS, b'{"prompt":"a","logit_bias":{', b'"%d":"x"', b"}}"),
    (COMPLETIONS, b'{"prompt":"a","max_tokens":1,"metadata":{', b'"%d":{}', b"}}"),
    (COMPLETIONS, b'{"prompt":"a",', b'"a%d":1', b"}"),
    (COMPLETIONS, b'{"prompt":"a",', b'"a%d":null', b"}"),
    (COMPLETIONS, b'{"prompt":"a","guided_json":{"a":[', b'{"a":1}', b"]}}"),
    (COMPLETIONS, b'{"prompt":"a","guided_choice":[', b'"a"', b"]}"),
    (COMPLETIONS, b"", b"[", b""),
    (COMPLETIONS, b'{"prompt":', b'{"a":', b""),
    (COMPLETIONS, b"", b"\xff", b""),
    ("/generate", b'{"input_embeds":[[', b"0.1234567", b"]]}"),
    ("/generate", b'{"input_embeds":[', b"[1.0]", b"]}"),
    ("/generate", b'{"text":"a","rid":"', b"a", b'"}'),
    ("/generate", b'{"text":"a","sampling_params":{"stop_token_ids":[', b"5", b"]}}"),
    ("/tokenize", b'{"messages":[', USER, b"]}"),
    ("/detokenize", b'{"tokens":[', b"5", b"]}"),
    ("/v1/embeddings", b'{"input":[', b'"a"', b"]}"),
    ("/abort_request", b'{"rid":"', b"a", b'"}'),
    ("/load_lora_adapter", b'{"lora_path":"a","lora_name":"', b"a", b'"}'),
]  # fmt: skip


def body_of(form: tuple[str, bytes, bytes, bytes], size: int) -> bytes:
    _, head, unit, tail = form
    in_list = head.endswith((b"[", b"{", b","))
    number = max((size - len(head) - len(tail)) // (len(unit.replace(b"%d", b"1234567")) + in_list), 1)
    units = [unit.replace(b"%d", b"%d" % i) for i in range(number)] if b"%d" in unit else [unit] * number
    return head + (b"," if in_list else b"").join(units) + tail


@pytest.fixture(scope="module")
def app() -> Iterator[tuple[Any, FakeClient]]:
    made = make_app(max_live_requests=4096)
    gc.collect()
    gc.freeze()  # as `diptych` does at its start
    yield made
    gc.unfreeze()


async def ask(app: Any, path: str, body: bytes, lag: Lag | None = None) -> Any:
    async with client_of(app) as client, lag or Lag():
        return await client.post(path, content=body, headers=HEADERS)


SIZES = [2**16, 2**20, pytest.param(MAX_BODY_BYTES - 2**16, marks=pytest.mark.full)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS, ids=[f"{f[0]}-{f[1][-20:]!r}-{f[2][:20]!r}" for f in FORMS])
def test_no_body_holds_up_the_others(app: Any, form: tuple[str, bytes, bytes, bytes], size: int) -> None:
    body, lag = body_of(form, size), Lag()
    answer = asyncio.run(ask(app[0], form[0], body, lag))
    assert answer.status_code in (200, 400), answer.text[:500]
    if answer.status_code == 400:
        assert len(answer.content) < MAX_ERROR_BYTES
    assert lag.longest < MAX_LAG


def test_long_prompts_are_taken(app: Any) -> None:
    """What clients send: a context full of token ids, of text with brackets, or of messages."""
    for path, body in (
        (COMPLETIONS, {"prompt": [5] * 130_000, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "[1,2],{" * 15_000, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [[5] * 512] * 1000, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 1000, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": '"\\"{[' * 10_000}], "max_tokens": 1}),
    ):
        answer = asyncio.run(ask(app[0], path, json.dumps(body).encode()))
        assert answer.status_code == 200, answer.text[:500]


def test_the_first_error_is_reported(app: Any) -> None:
    answer = asyncio.run(ask(app[0], CHAT, b'{"messages": [' + b"1, " * 9000 + b"1]}"))
    assert answer.json()["error"]["param"] == "messages.0"
    answer = asyncio.run(ask(app[0], COMPLETIONS, json.dumps({"prompt": ["a"] * 2000 + [1]}).encode()))
    assert answer.json()["error"]["param"] == "prompt.2000"


def test_a_translation_that_is_too_long_is_refused(app: Any) -> None:
    """Each result of a tool becomes a message of its own."""
    turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 5000}
    body = {"messages": [turn, turn], "max_tokens": 1}
    answer = asyncio.run(ask(app[0], MESSAGES, json.dumps(body).encode()))
    assert answer.status_code == 400
    assert "at most 8192" in answer.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a\\"[]{},:é'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a\\"[]{},:'), inner, max_size=4),
)


@given(JSON, st.booleans())
@settings(max_examples=150)
def test_marks_are_counted_outside_of_texts(value: Any, is_ascii: bool) -> None:
    def count(value: Any) -> tuple[int, int, int]:
        inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        counts = [count(each) for each in inner]
        own = (isinstance(value, list), isinstance(value, dict), len(value) if isinstance(value, dict) else 0)
        lists, objects, names = (sum(each[i] for each in counts) + own[i] for i in range(3))
        return lists, objects, names

    found = bodies.count_marks(json.dumps(value, ensure_ascii=is_ascii).encode(), 3)
    assert (found[b"["], found[b"{"], found[b":"]) == count(value)


@pytest.mark.parametrize("mark", MAX_MARKS)
def test_the_limits_of_marks(mark: bytes) -> None:
    limit, what = MAX_MARKS[mark]
    bodies.check_size(b'"' + mark * (limit + 1) + b'"')
    bodies.check_size(mark * limit)
    with pytest.raises(ApiError, match=f"more than {what}"):
        bodies.check_size(mark * (limit + 1))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"prompt": list(range(30_000)), "n": 1}),
        '{"a": "' + "a" * 20_000 + '\\ud800", "x": [NaN, -Infinity, 1e400, 123456789012345678901234567890]}',
        json.dumps([10**30 - 1] * 1000),
        '{"a": 1, "a": 2, "b": "' + "é" * 20_000 + '"}',
        "[" + "[]," * 2000 + "0]",
    ],
)
def test_a_long_body_is_read_as_a_short_one(text: str) -> None:
    """By one call or with pauses: the same values, those that only one of the two parsers takes included."""
    found = bodies.read_body(TypeAdapter(Any), text.encode(), bodies._loads_with_pauses)
    assert repr(found) == repr(json.loads(text))


def test_numbers_of_many_digits_are_read_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MB of few values: one call would hold up other requests for 0.3 s."""
    text = f"[{','.join(['7' * 4000] * 2000)}]"
    monkeypatch.setattr(bodies.msgspec.json, "decode", lambda _: pytest.fail("one call"))
    assert bodies._loads_with_pauses(text.encode())[-1] == int("7" * 4000)
