"""/v1/responses without stored state: OpenAI's Responses API as a translation of /v1/chat/completions.

A request becomes a `ChatRequest`, and the chunks of its answer become typed events. A response that is not
streamed is the one that the last event carries.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Discriminator, Field, Tag

from diptych.shared.server.api import sse
from diptych.shared.server.api.answers import Chunk, check_model, respond
from diptych.shared.server.api.body import Body
from diptych.shared.server.api.chat import chat_chunks, start_chat
from diptych.shared.server.api.field_table import without_ignored
from diptych.shared.server.api.field_types import MAX_TOOLS, MAX_TOP_LOGPROBS, Key
from diptych.shared.server.api.generation import Generation, Usage
from diptych.shared.server.api.protocol import (
    ChatRequest,
    Function,
    FunctionCall,
    Message,
    Tool,
    ToolCall,
)
from diptych.shared.server.api.response_items import Event, OutputItems
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.errors import ApiError, bad_request, renamed
from diptych.shared.types import SamplingParams

FIELDS_OF_CHAT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Field of a chat request -> field from which it comes"""


class TextContent(Body):
    place = "responses.input[].content[]"

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class InputItem(Body):
    place = "responses.input[]"


class MessageItem(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextContent]


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    content: list[TextContent] = Field(default_factory=list)
    summary: list[TextContent] = Field(default_factory=list)


class FunctionCallItem(InputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextContent]


def _type_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_type_of),
]


class FunctionTool(Body):
    place = "responses.tools[]"

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "output"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat = TextFormat()  # type: ignore[call-arg]  # pydantic: `schema` is an alias
    verbosity: Literal["low", "medium", "high"] = "medium"  # no chat template takes it


class ReasoningOptions(Body):
    place = "responses.reasoning"

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # it is given whole, so there is none


class StreamOptions(Body):
    place = "responses.stream_options"


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
"""Only log-probabilities are ever there to include: the others are of tools that the server does not run."""

SAMPLED = ("temperature", "top_p")
"""Fields that the model's defaults stand in for."""


def _without(place: str) -> BeforeValidator:
    """Drops entries that the table of fields ignores."""
    return BeforeValidator(lambda entries: without_ignored(entries, f"responses.{place}"))


class ResponsesRequest(Body):
    """/v1/responses."""

    place = "responses"

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1), _without("input[]")]
    instructions: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    include: list[Includable] = Field(default_factory=list)
    tools: Annotated[list[FunctionTool], _without("tools[]")] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["disabled", "auto"] = "disabled"  # a prompt that is too long is refused either way
    prompt_cache_key: Key | None = None
    metadata: dict[str, Key] = Field(default_factory=dict, max_length=16)  # OpenAI's limits; it is echoed
    user: Key | None = None
    safety_identifier: Key | None = None
    service_tier: Key | None = None


def add_responses_routes(app: FastAPI, state: ServerState) -> None:
    """/v1/responses."""

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        check_model(body.model, state)
        chat = chat_request(body)
        with renamed(FIELDS_OF_CHAT):
            generation = await start_chat(chat, state)
        events = response_events(body, chat_chunks(chat, generation, state), generation)
        return await respond(request, body.stream, events, generation, fold_response, written)


# ---- request ----


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The same conversation and sampling for /v1/chat/completions."""
    if not body.tools and body.tool_choice not in ("none", "auto"):
        raise bad_request("tool_choice needs tools", "tool_choice")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages_of(body),
        "max_completion_tokens": body.max_output_tokens,
        **{name: getattr(body, name) for name in SAMPLED if name in body.model_fields_set},
        "reasoning_effort": body.reasoning.effort,
        "routing_key": body.prompt_cache_key,
    }
    if "message.output_text.logprobs" in body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        functions = [Function(**tool.model_dump(exclude={"type"})) for tool in body.tools]
        choice = body.tool_choice
        fields["tools"] = [Tool(function=function) for function in functions]
        fields["parallel_tool_calls"] = body.parallel_tool_calls
        fields["tool_choice"] = choice if isinstance(choice, str) else _choice_of_chat(choice)
    form = body.text.format
    if form.type != "text":
        fields["response_format"] = {"type": form.type}
    if form.type == "json_schema":
        fields["response_format"]["json_schema"] = form.model_dump(by_alias=True, exclude={"type"})
    return ChatRequest(**fields)


def _choice_of_chat(choice: NamedFunction | AllowedFunctions) -> dict[str, Any]:
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _messages_of(body: ResponsesRequest) -> list[Message]:
    """Items of one answer (reasoning, text, calls) become one message of the assistant."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for item in body.input:
        if isinstance(item, FunctionOutputItem):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=_text_of(item.output)))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(Message(role=item.role, content=_text_of(item.content)))
        else:
            _add_to_answer(messages, item)
    return messages


def _add_to_answer(messages: list[Message], item: MessageItem | ReasoningItem | FunctionCallItem) -> None:
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if isinstance(item, FunctionCallItem):
        if last is None:
            messages.append(last := Message(role="assistant"))
        function = FunctionCall(name=item.name, arguments=item.arguments)
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(ToolCall(id=item.call_id, function=function))
    elif isinstance(item, ReasoningItem):
        messages.append(Message(role="assistant", reasoning_content=_text_of(item.content or item.summary)))
    elif last is not None and last.content is None and last.tool_calls is None:
        last.content = _text_of(item.content)
    else:
        messages.append(Message(role="assistant", content=_text_of(item.content)))


def _text_of(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# ---- answer ----


async def response_events(
    body: ResponsesRequest, chunks: AsyncIterator[Chunk], generation: Generation
) -> AsyncIterator[Event]:
    """The events of an answer, numbered."""
    number = 0
    async for event in _events(body, chunks, generation):
        yield {**event, "sequence_number": number}
        number += 1


async def _events(
    body: ResponsesRequest, chunks: AsyncIterator[Chunk], generation: Generation
) -> AsyncIterator[Event]:
    items, response = OutputItems(), _empty_response(body, generation.params)
    is_started, finish_reason = False, None
    async for chunk in chunks:
        if not is_started:
            is_started = True
            response["model"] = chunk["model"]
            yield {"type": "response.created", "response": dict(response)}
            yield {"type": "response.in_progress", "response": dict(response)}
        for choice in chunk["choices"]:
            for event in items.of_delta(choice["delta"], choice["logprobs"]):
                yield event
            finish_reason = choice["finish_reason"] or finish_reason
    status = "incomplete" if finish_reason == "length" else "completed"
    for event in items.close(status):
        yield event
    response |= {"status": status, "output": items.output, "usage": _usage_body(generation.usage)}
    if status == "incomplete":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    yield {"type": f"response.{status}", "response": response}


def _empty_response(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    echoed = body.model_dump(by_alias=True, exclude={"input", "stream", "stream_options", "include"})
    return {
        **echoed,
        **{name: getattr(params, name) for name in SAMPLED},
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "store": False,
        "created_at": int(time.time()),
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "background": False,
        "usage": None,
    }


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def written(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """The events of a stream. A failure becomes `error`, and `response.failed` with the items that ended."""
    number, response, output = 0, dict[str, Any](), list[Any]()
    try:
        async for event in events:
            number, response = event["sequence_number"] + 1, event.get("response", response)
            if event["type"] == "response.output_item.done":
                output.append(event["item"])
            is_delta = event["type"].endswith(".delta")  # every other event repeats what came before
            data = sse.event(event, event["type"]) if is_delta else await sse.long_event(event, event["type"])
            yield data
    except ApiError as error:
        code = error.code or ("rate_limit_exceeded" if error.status == 429 else "server_error")
        said = {"code": code, "message": error.message}
        failed = {**response, "status": "failed", "output": output, "error": said}
        for name, fields in (
            ("error", {**said, "param": error.param, "error": error.body()["error"]}),  # clients read either
            ("response.failed", {"response": failed}),
        ):
            yield sse.event({"type": name, **fields, "sequence_number": number}, name)
            number += 1


def fold_response(events: list[Event], usage: Usage) -> dict[str, Any]:
    """The response of a request that does not stream."""
    response: dict[str, Any] = events[-1]["response"]
    return response
