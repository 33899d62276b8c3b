"""/v1/messages: Anthropic's own client against a real server process, and the translation itself."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any, Literal

import pytest

from diptych.shared.server.api.anthropic import MessagesRequest, chat_request, fold_message, message_events
from diptych.shared.server.api.generation import Usage
from tests.server.running import RunningServer, anthropic_client, openai_client
from tests.server.translations import ANSWER_WITH_TOOLS, FakeGeneration, chunk, translated

if TYPE_CHECKING:
    import anthropic

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
STORY = [{"role": "user", "content": "Count from 3 to 12."}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic_client(server)


def create(client: anthropic.Anthropic, **body: Any) -> anthropic.types.Message:
    body = {"model": "tiny-dense", "max_tokens": 64, "extra_body": GREEDY, **body}
    message: anthropic.types.Message = client.messages.create(**body)
    return message


def test_an_answer_is_that_of_the_chat_endpoint(server: RunningServer, client: anthropic.Anthropic) -> None:
    chat = openai_client(server).chat.completions
    other = chat.create(model="tiny-dense", messages=STORY, temperature=0, max_tokens=64)  # type: ignore[arg-type]
    message = create(client, messages=STORY)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == other.choices[0].message.content
    assert (message.role, message.type, message.stop_reason) == ("assistant", "message", "end_turn")
    assert message.usage.output_tokens == other.usage.completion_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == other.usage.prompt_tokens


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "end_turn"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"stop_sequences": ["8"]}, "stop_sequence"),
        ({"system": "Be brief."}, "end_turn"),
        ({"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]}]}, None),
        ({"metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}}, "end_turn"),
    ],
    ids=["plain", "length", "stop", "system", "system blocks", "blocks", "accepted"],
)
def test_a_stream_is_the_whole_answer(
    client: anthropic.Anthropic, more: dict[str, Any], reason: str | None
) -> None:
    body = {"messages": STORY, **more}
    create(client, **body)  # from now on the prompt is cached, and usage is the same
    whole = create(client, **body)
    with client.messages.stream(
        **{"model": "tiny-dense", "max_tokens": 64, "extra_body": GREEDY, **body}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    fields = ("role", "model", "stop_reason", "stop_sequence", "usage")
    for name in fields:
        assert getattr(final, name) == getattr(whole, name)
    assert [block.text for block in final.content] == [block.text for block in whole.content]  # type: ignore[union-attr]
    assert reason in (None, whole.stop_reason)
    assert whole.stop_sequence == ("8" if reason == "stop_sequence" else None)


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"messages": SUM, "system": "Be correct."}
    counted = client.messages.count_tokens(model="tiny-dense", **body).input_tokens
    usage = create(client, **body).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert create(client, **body).usage.cache_read_input_tokens == counted - 1


def test_beta_query_and_head(server: RunningServer, client: anthropic.Anthropic) -> None:
    message = client.beta.messages.create(
        model="tiny-dense", max_tokens=20, messages=SUM, extra_body=GREEDY, betas=["any-beta"]
    )
    assert message.content[0].text == "12 + 30 = 42"
    request = urllib.request.Request(server.url + "/", method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ({"model": "claude"}, "NotFoundError", "claude"),
        ({"extra_body": {"temprature": 1}}, "BadRequestError", "temprature"),
        ({"extra_body": {"temperature": 3}}, "BadRequestError", "temperature"),
        ({"max_tokens": 4000}, "BadRequestError", "context"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": PNG}]}]},
            "BadRequestError",
            "Qwen3ForCausalLM takes no images",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "BadRequestError", "tools"),
    ],
    ids=["model", "unknown", "range", "context", "image", "server tool"],
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_bad_requests_raise_the_clients_errors(
    client: anthropic.Anthropic, body: dict[str, Any], error: str, said: str, is_stream: bool
) -> None:
    import anthropic

    with pytest.raises(getattr(anthropic, error), match=said):
        create(client, **{"messages": SUM, "stream": is_stream, **body})


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bergen", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": CITY}


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=["any", "named"]
)
def test_a_tool_is_called_and_its_result_is_read(client: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    body: dict[str, Any] = {"messages": SUM, "tools": [WEATHER], "tool_choice": choice}
    whole = create(client, **body)
    call = whole.content[-1]
    assert (call.type, call.name, whole.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["city"] in ("Bergen", "Lima")
    with client.messages.stream(model="tiny-dense", max_tokens=64, extra_body=GREEDY, **body) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == call.input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    turns = [*SUM, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert create(client, messages=turns, tools=[WEATHER]).stop_reason in ("end_turn", "max_tokens")


def test_structured_output(client: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    message = create(client, messages=SUM, output_config=form)
    assert json.loads(message.content[0].text)["city"] in ("Bergen", "Lima")


def test_an_agents_requests_find_their_prefix(client: anthropic.Anthropic) -> None:
    """Fields that coding agents send, and a first system block that changes with every request."""

    def ask(nonce: str) -> anthropic.types.Message:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"}
        keep_thinking = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        return create(
            client,
            system=[header, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=SUM,
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={**GREEDY, "context_management": keep_thinking},
        )

    ask("74943")
    message = ask("0aaa9")
    assert message.usage.input_tokens == 1, "all but the last token of the prompt is cached"
    plain = client.messages.count_tokens(model="tiny-dense", messages=SUM, system="Be brief.").input_tokens
    assert message.usage.cache_read_input_tokens == plain - 1


# ---- the translation ----


def events_of(chunks: list[dict[str, Any]], stops: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return translated(chunks, lambda source: message_events(source, FakeGeneration(), list(stops)))  # type: ignore[arg-type]


def test_blocks_of_an_answer_with_tools() -> None:
    events = events_of(ANSWER_WITH_TOOLS)
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    opened: list[int] = []
    for event in events:
        if event["type"] == "content_block_start":
            opened.append(event["index"])
        elif event["type"].startswith("content_block"):
            assert event["index"] == opened[-1], "a block that is not open"
    assert opened == [0, 1, 2, 3]
    message = fold_message(events, Usage())
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_0", "name": "add", "input": {"a": 1, "b": "ü"}},
        {"type": "tool_use", "id": "call_1", "name": "now", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
    }


def test_arguments_that_were_cut_off() -> None:
    chunks = [*ANSWER_WITH_TOOLS[:7], chunk({}, "length")]
    message = fold_message(events_of(chunks), Usage())
    assert message["content"][-1]["input"] == {"a": 1}
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 8e2786730}', {"a": "8e2786730"}),
        ('{"a": NaN}', {"a": "NaN"}),
        (f'{{"a": {"9" * 5000}}}', {"a": "9" * 5000}),
        ('{"a": "x\\ud83d"}', {"a": "x?"}),
    ],
    ids=["float", "nan", "integer", "surrogate"],
)
def test_arguments_beyond_what_python_reads(text: str, found: Any) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    chunks = [chunk({"role": "assistant"}), chunk({"tool_calls": [call]}), chunk({}, "tool_calls")]
    assert fold_message(events_of(chunks), Usage())["content"][-1]["input"] == found


@pytest.mark.parametrize(("matched", "reason"), [("8", "stop_sequence"), (2, "end_turn"), (None, "end_turn")])
def test_a_stop_token_is_no_stop_sequence(matched: Any, reason: str) -> None:
    events = events_of([chunk({"content": "a"}), chunk({}, "stop", matched_stop=matched)], ("8", "9"))
    assert events[-2]["delta"]["stop_reason"] == reason


def test_a_conversation_with_tools() -> None:
    body = MessagesRequest.model_validate(
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
            "messages": [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "redacted_thinking", "data": "encrypted"},
                        {"type": "text", "text": "x"},
                        {"type": "tool_use", "id": "i", "name": "f", "input": {"a": "ü"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "i",
                            "content": [{"type": "text", "text": "r"}],
                        },
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        }
    )
    chat = chat_request(body)
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {"role": "system", "content": "AB"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "t",
            "tool_calls": [
                {"id": "i", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "i"},
        {"role": "user", "content": "and?"},
    ]
    assert chat.max_tokens == 9
    assert chat.tools is not None
    assert chat.tools[0].function.parameters == {"type": "object"}
    assert chat.tool_choice.function.name == "f"  # type: ignore[union-attr]
    assert not chat.parallel_tool_calls


def test_a_tool_runner_goes_on_without_a_thread(client: anthropic.Anthropic) -> None:
    """It asks the server to store the conversation, and sends the whole one when that is refused."""
    import anthropic

    called: list[str] = []

    @anthropic.beta_tool
    def weather(city: Literal["Bergen", "Lima"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "Rain."

    runner = client.beta.messages.tool_runner(
        model="tiny-dense", max_tokens=64, messages=SUM, tools=[weather], tool_choice={"type": "any"},
        max_iterations=2, extra_body=GREEDY,
    )  # fmt: skip
    reasons = [message.stop_reason for message in runner]
    assert reasons[0] == "tool_use"
    assert called
