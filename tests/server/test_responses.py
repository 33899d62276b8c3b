"""/v1/responses: OpenAI's own client against a real server process, and the translation itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diptych.shared.server.api.generation import Usage
from diptych.shared.server.api.responses import ResponsesRequest, chat_request, fold_response, response_events
from tests.server.running import RunningServer, openai_client
from tests.server.translations import ANSWER_WITH_TOOLS, FakeGeneration, chunk, translated

if TYPE_CHECKING:
    import openai

STORY = "Count from 3 to 12."


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai_client(server)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, "completed"),
        ({"max_output_tokens": 5}, "incomplete"),
        ({"instructions": "Be brief."}, "completed"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": STORY}]}]}, "completed"),
        ({"store": False, "metadata": {"a": "b"}, "prompt_cache_key": "k"}, "completed"),
    ],
    ids=["plain", "length", "instructions", "items", "accepted"],
)
def test_a_stream_is_the_whole_answer(client: openai.OpenAI, more: dict[str, Any], status: str) -> None:
    body = {"model": "tiny-dense", "input": STORY, "temperature": 0, **more}
    client.responses.create(**body)  # from now on the prompt is cached, and usage is the same
    whole = client.responses.create(**body)
    assert whole.status == status
    events = list(client.responses.create(stream=True, **body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{status}"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert text == whole.output_text == final.output_text
    assert final.usage == whole.usage
    assert (final.status, final.incomplete_details) == (whole.status, whole.incomplete_details)


def test_an_answer_is_that_of_the_chat_endpoint(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny-dense", messages=[{"role": "user", "content": STORY}], temperature=0
    )
    with client.responses.stream(model="tiny-dense", input=STORY, temperature=0) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.store is False  # type: ignore[attr-defined]


def test_logprobs_cover_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny-dense", input="What is 12 + 30?", temperature=0, top_logprobs=2,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    entries = response.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == response.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "file_search"}]}, "tools"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 10**6}, "context"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_bad_requests_say_what_is_wrong(
    client: openai.OpenAI, body: dict[str, Any], said: str, is_stream: bool
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(**{"model": "tiny-dense", "input": "a", "stream": is_stream, **body})


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bergen", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "weather"}], ids=["any", "named"]
)
def test_a_function_is_called_and_its_output_is_read(client: openai.OpenAI, choice: Any) -> None:
    body: dict[str, Any] = {"model": "tiny-dense", "temperature": 0, "tools": [WEATHER]}
    calling = {**body, "input": STORY, "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.responses.create(**calling)
    call = whole.output[-1]
    assert (call.type, call.name, whole.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Bergen", "Lima")
    with client.responses.stream(**calling) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response().output[-1]
    assert (final.name, final.arguments) == (call.name, call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    items = [{"role": "user", "content": STORY}, call.model_dump(exclude_none=True), output]
    assert client.responses.create(**body, input=items, max_output_tokens=8).output_text


@pytest.mark.parametrize("tool_choice", ["required", "auto"])
def test_logprobs_beside_a_call(client: openai.OpenAI, tool_choice: Any) -> None:
    """The text of some tokens is held back, because a marker may begin there."""
    schema = {**CITY, "properties": {"city": {"enum": ["a<b", "c</d", "e</tool_call>f"]}}}
    body: dict[str, Any] = {"input": STORY, "temperature": 0, "tools": [{**WEATHER, "parameters": schema}]}
    body |= {"model": "tiny-dense", "tool_choice": tool_choice, "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**body, parallel_tool_calls=False)
    with client.responses.stream(**body, parallel_tool_calls=False) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    for response in (whole, final):
        assert [item.type for item in response.output] == [
            "function_call" if tool_choice == "required" else "message"
        ]
        if tool_choice == "required":
            assert json.loads(response.output[0].arguments)["city"] in ("a<b", "c</d", "e</tool_call>f")


def test_structured_output(client: openai.OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "place", "schema": CITY, "strict": True}}
    response = client.responses.create(model="tiny-dense", input=STORY, temperature=0, text=form)
    assert json.loads(response.output_text)["city"] in ("Bergen", "Lima")


# ---- the translation ----


def events_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    body = ResponsesRequest(input="q")
    return translated(chunks, lambda source: response_events(body, source, FakeGeneration()))  # type: ignore[arg-type]


def test_items_of_an_answer_with_tools() -> None:
    events = events_of(ANSWER_WITH_TOOLS)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    response = fold_response(events, Usage())
    assert response["output"] == done
    assert [item["id"] for item in done] == added
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert done[1]["content"][0]["text"] == "Let me see."
    assert [(item["call_id"], item["name"], item["arguments"]) for item in done[2:]] == [
        ("call_0", "add", '{"a": 1, "b": "ü"}'),
        ("call_1", "now", "{}"),
    ]
    assert all(item["status"] == "completed" for item in done)
    for index, item in enumerate(done):
        deltas = [e for e in events if e.get("output_index") == index and e["type"].endswith(".delta")]
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(event["delta"] for event in deltas) == text
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_logprobs_of_text_that_was_held_back() -> None:
    def held(token: str, text: str = "") -> dict[str, Any]:
        return chunk({"content": text}, logprobs={"content": [{"token": token}]})

    begin, end = ANSWER_WITH_TOOLS[:3], ANSWER_WITH_TOOLS[-1]
    calls = [*ANSWER_WITH_TOOLS[5:6], held("{"), *ANSWER_WITH_TOOLS[6:-1]]
    response = events_of([*begin, held("<"), held("b", "<b"), held("<tool_call>"), *calls, end])[-1][
        "response"
    ]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", *["function_call"] * 2]
    (part,) = response["output"][1]["content"]
    assert part["text"] == "<b"
    assert [entry["token"] for entry in part["logprobs"]] == ["<", "b", "<tool_call>"]
    assert response["output"][2]["arguments"] == '{"a": 1, "b": "ü"}'


def test_the_last_item_of_a_cut_answer_is_incomplete() -> None:
    events = events_of([*ANSWER_WITH_TOOLS[:4], chunk({}, "length")])
    response = events[-1]["response"]
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_items_of_one_answer_become_one_message() -> None:
    body = ResponsesRequest.model_validate(
        {
            "instructions": "I",
            "input": [
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "r"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        }
    )  # fmt: skip
    chat = chat_request(body)
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in (("1", "f"), ("2", "g"))
    ]
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {"role": "system", "content": "I"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "x", "reasoning_content": "t", "tool_calls": calls},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    assert chat.tool_choice.function.name == "f"  # type: ignore[union-attr]
    assert chat.response_format is not None
    assert chat.response_format.type == "json_schema"
    assert chat.response_format.json_schema.schema_ == {"type": "object"}  # type: ignore[union-attr]
