"""Every row of the table of fields, in a request: ignored with one line of the log, or refused by name."""

from __future__ import annotations

import asyncio
import copy
from typing import Any
from unittest import TestCase

import httpx
import pytest

from diptych.shared.server.api import field_table
from diptych.shared.server.api.field_table import IGNORED, REFUSED
from tests.server.in_process import client_of, make_app

CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
TEXT = [{"type": "text", "text": "a"}]
USER = {"role": "user", "content": TEXT}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {
        "messages": [{"role": "assistant", "content": TEXT, "tool_calls": [CALL]}, USER],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "stream_options": {},
    }),
    "completions": ("/v1/completions", {"prompt": "a"}),
    "generate": ("/generate", {"text": "a", "sampling_params": {}}),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "score": ("/v1/score", {"text_1": "a", "text_2": "b"}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    "tokenize": ("/tokenize", {"prompt": "a"}),
    "detokenize": ("/detokenize", {"tokens": [5]}),
    "responses": ("/v1/responses", {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "tools": [{"type": "function", "name": "f"}],
        "reasoning": {},
        "stream_options": {},
    }),
    "messages": ("/v1/messages", {
        "messages": [USER],
        "max_tokens": 1,
        "thinking": {"type": "disabled"},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }),
}  # fmt: skip
"""A body in which every place of the table exists."""

ROWS = [
    (place, name)
    for table in (IGNORED, REFUSED)
    for places, names in table.items()
    for place in places.split()
    for name in names
]


def with_field(place: str, name: str) -> tuple[str, dict[str, Any]]:
    """A route, and its body with this field. For a place of types: with one more object of this type."""
    api, *steps = place.split(".")
    route, body = copy.deepcopy(BODIES[api])
    target: Any = body
    for step in steps:
        target = target[0] if isinstance(target, list) and step != "type" else target
        target = target[step.removesuffix("[]")] if step != "type" else target
    if isinstance(target, list) and steps[-1] == "type":
        target.append({"type": name, "anything": {"a": 1}})
    else:
        (target[0] if isinstance(target, list) else target)[name] = {"a": [1]}
    return route, body


async def ask(app: Any, route: str, body: dict[str, Any]) -> httpx.Response:
    async with client_of(app) as client:
        return await client.post(route, json=body)


@pytest.fixture(scope="module")
def app() -> Any:
    return make_app()[0]


@pytest.mark.parametrize("place", dict.fromkeys(place for place, _ in ROWS))
def test_the_fields_of_the_table(app: Any, place: str, monkeypatch: Any) -> None:
    for name in (name for its_place, name in ROWS if its_place == place):
        monkeypatch.setattr(field_table, "_LOGGED", set())
        route, body = with_field(place, name)
        rule = field_table.rules(place)[name]
        if rule.is_ignored:
            with TestCase().assertLogs() as log:
                for _ in range(2):
                    answer = asyncio.run(ask(app, route, body))
                    assert answer.status_code == 200, (name, answer.text)
            assert sum(repr(name) in line for line in log.output) == 1, name
        else:
            answer = asyncio.run(ask(app, route, body))
            error = answer.json()["error"]
            assert answer.status_code == 400, name
            assert error["param"].endswith(name) or place.endswith(".type"), name
            assert name in error["message"]
            assert rule.reason in error["message"], name


@pytest.mark.parametrize("place", sorted({place for place, _ in ROWS if not place.endswith(".type")}))
@pytest.mark.parametrize("value", [1, "x", [1], {"a": 1}, True])
def test_any_other_field_is_refused_by_name(app: Any, place: str, value: Any) -> None:
    """`null` and `false` are accepted."""
    route, body = with_field(place, "unheard_of")
    for given, status in ((value, 400), (None, 200), (False, 200)):
        text = copy.deepcopy(body)
        answer = asyncio.run(ask(app, route, _replaced(text, {"a": [1]}, given)))
        assert answer.status_code == status, answer.text
        if status == 400:
            assert "unknown field" in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"].endswith("unheard_of")


def _replaced(value: Any, old: Any, new: Any) -> Any:
    if value == old:
        return new
    if isinstance(value, dict):
        return {name: _replaced(each, old, new) for name, each in value.items()}
    return [_replaced(each, old, new) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("route", "more", "param", "said"),
    [
        ("chat", {"modalities": ["text", "audio"]}, "modalities.1", "'audio'"),
        ("chat", {"response_format": {"type": "grammar"}}, "response_format.type", "'grammar'"),
        ("chat", {"tool_choice": "sometimes"}, "tool_choice", "'sometimes'"),
        ("responses", {"include": ["all"]}, "include.0", "'all'"),
        ("responses", {"truncation": "middle"}, "truncation", "'middle'"),
        ("responses", {"text": {"verbosity": "none"}}, "text.verbosity", "'none'"),
        ("responses", {"tools": [{"type": "computer_use", "name": "c"}]}, "tools.0.type", "'computer_use'"),
        (
            "messages",
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools.0.type",
            "'bash_20250124'",
        ),
        ("messages", {"thinking": {"type": "hard"}}, "thinking.type", "'hard'"),
    ],
)
def test_a_value_that_changes_the_answer_is_refused_by_name(
    app: Any, route: str, more: dict[str, Any], param: str, said: str
) -> None:
    path, body = BODIES[route]
    error = asyncio.run(ask(app, path, {**body, **more})).json()["error"]
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_allowed_tools_are_the_only_ones(app: Any, route: str, mode: str) -> None:
    path, body = copy.deepcopy(BODIES[route])

    def tool(name: str) -> dict[str, Any]:
        named = {"name": name}
        return {"type": "function", **({"function": named} if route == "chat" else named)}

    body["tools"] = [tool("f"), tool("g")]
    for name, status in (("g", 200), ("h", 400)):
        allowed: dict[str, Any] = {"mode": mode, "tools": [tool(name)]}
        nested = {"allowed_tools": allowed} if route == "chat" else allowed
        body["tool_choice"] = {"type": "allowed_tools", **nested}
        answer = asyncio.run(ask(app, path, body))
        assert answer.status_code == status
    error = answer.json()["error"]
    assert "'h'" in error["message"]
    assert error["param"] == "tool_choice"
