"""/v1/messages: Anthropic's API as a translation of /v1/chat/completions, in both directions.

A request becomes a `ChatRequest`, and the chunks of its answer become Anthropic's events. A response that is
not streamed is the fold of the same events.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from diptych.shared.dialects.parts.json_calls import loads
from diptych.shared.server.api import sse
from diptych.shared.server.api.answers import Chunk, check_model, respond
from diptych.shared.server.api.anthropic_images import ImageBlock, content_of
from diptych.shared.server.api.body import Body
from diptych.shared.server.api.chat import chat_chunks, start_chat
from diptych.shared.server.api.chat_prompt import template_args_of
from diptych.shared.server.api.field_table import without_ignored
from diptych.shared.server.api.field_types import MAX_TOOLS
from diptych.shared.server.api.generation import Generation, Usage
from diptych.shared.server.api.protocol import (
    ChatRequest,
    Function,
    FunctionCall,
    Message,
    Tool,
    ToolCall,
)
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.errors import bad_request, renamed

Event = dict[str, Any]

FIELDS_OF_CHAT = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}
"""Field of a chat request -> field from which it comes"""

DELTA_TEXTS = {"input_json_delta": "partial_json", "text_delta": "text", "thinking_delta": "thinking"}
"""Type of a delta -> its field with a text"""

BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a system block for Anthropic's accounting, which some agents send first. It is left out: it changes
with every request, so no prompt would begin like an earlier one and the prefix cache would find nothing."""


class ContentBlock(Body):
    place = "messages.messages[].content[]"


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str


class ThinkingBlock(ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(ContentBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


def _kept_blocks(blocks: Any) -> Any:
    return without_ignored(blocks, "messages.messages[].content[]")


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], BeforeValidator(_kept_blocks)]


class ToolParam(Body):
    place = "messages.tools[]"

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoiceParam(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""  # of type tool
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    place = "messages.thinking"

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class ClearThinking(Body):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]  # clears nothing


class ContextManagement(Body):
    edits: list[ClearThinking] = Field(default_factory=list)


class CountTokensRequest(Body):
    """/v1/messages/count_tokens."""

    place = "messages"

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[TextBlock] = ""
    tools: list[ToolParam] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceParam = ToolChoiceParam(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest):
    """/v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: list[str] = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0


def add_anthropic_routes(app: FastAPI, state: ServerState) -> None:
    """/v1/messages and its token counter."""

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        check_model(body.model, state)
        chat = chat_request(body)
        with renamed(FIELDS_OF_CHAT):
            generation = await start_chat(chat, state)
        chunks = chat_chunks(chat, generation, state)
        events = message_events(chunks, generation, body.stop_sequences)
        return await respond(request, body.stream, events, generation, fold_message, sse.named_events)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        check_model(body.model, state)
        chat = chat_request(body)
        tools = [tool.model_dump(exclude_none=True) for tool in chat.tools or ()]
        args = template_args_of(chat, state.prompts)
        prompt, _ = await state.prompts.of_messages(chat.messages, tools, args)
        return {"input_tokens": len(prompt.ids)}


# ---- request ----


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The same conversation and sampling for /v1/chat/completions."""
    if not body.tools and body.tool_choice.type in ("any", "tool"):
        raise bad_request("tool_choice needs tools", "tool_choice")
    messages = [message for turn in body.messages for message in _messages_of(turn)]
    system = body.system
    if isinstance(system, list) and system and system[0].text.startswith(BILLING_HEADER):
        system = system[1:]
    if system:
        messages.insert(0, Message(role="system", content=_text_of(system)))
    fields: dict[str, Any] = {"messages": messages, "model": body.model}
    fields["continue_final_message"] = body.messages[-1].role == "assistant"
    if body.tools and body.tool_choice.type != "none":
        fields["tools"] = [
            Tool(
                function=Function(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                )
            )
            for tool in body.tools
        ]
        fields["tool_choice"] = {
            "auto": "auto",
            "any": "required",
            "tool": {"type": "function", "function": {"name": body.tool_choice.name}},
        }[body.tool_choice.type]
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    fields["reasoning_effort"] = body.output_config.effort
    if body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        names = {"max_tokens", "temperature", "top_p", "top_k"} & body.model_fields_set
        fields |= {name: getattr(body, name) for name in names}
        fields["stop"] = body.stop_sequences
    return ChatRequest(**fields)


def _text_of(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _messages_of(turn: Turn) -> list[Message]:
    """Results of tools are messages of their own, before the text of their turn."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    results = [
        Message(role="tool", tool_call_id=block.tool_use_id, content=_text_of(block.content))
        for block in turn.content
        if isinstance(block, ToolResultBlock)
    ]
    calls = [
        ToolCall(
            id=block.id,
            function=FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)),
        )
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    text = content_of(turn.content)
    thinking = "".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock))
    if results and not (text or thinking or calls):
        return results
    message = Message(
        role=turn.role, content=text, tool_calls=calls or None, reasoning_content=thinking or None
    )
    return [*results, message]


# ---- answer ----


async def message_events(
    chunks: AsyncIterator[Chunk], generation: Generation, stop_sequences: list[str]
) -> AsyncIterator[Event]:
    """message_start; for each content block its start, deltas and stop; message_delta; message_stop."""
    blocks = Blocks()
    is_started = False
    async for chunk in chunks:
        if not is_started:
            is_started = True
            yield {"type": "message_start", "message": _empty_message(chunk["model"], generation.usage)}
        (choice,) = chunk["choices"]
        for event in blocks.of_delta(choice["delta"]):
            yield event
        if choice["finish_reason"] is None:
            continue
        for event in blocks.close():
            yield event
        matched = choice.get("matched_stop")
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(choice["finish_reason"], "end_turn")
        if reason == "end_turn" and matched in stop_sequences:
            reason = "stop_sequence"
        delta = {
            "stop_reason": reason,
            "stop_sequence": matched if reason == "stop_sequence" else None,
        }
        yield {"type": "message_delta", "delta": delta, "usage": _usage_body(generation.usage)}
    yield {"type": "message_stop"}


def _empty_message(model: str, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage_body(usage) | {"output_tokens": 0},
    }


def _usage_body(usage: Usage) -> dict[str, int]:
    """Prompt tokens from the cache are not among `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class Blocks:
    """The content blocks of a message; one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: Any = None  # its kind; of a tool call, the call's index

    def of_delta(self, delta: dict[str, Any]) -> Iterator[Event]:
        """Events of a chat delta."""
        if thinking := delta.get("reasoning_content"):
            empty: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._piece("thinking", empty, {"type": "thinking_delta", "thinking": thinking})
        if text := delta.get("content"):
            empty = {"type": "text", "text": ""}
            yield from self._piece("text", empty, {"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            empty = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            piece = {"type": "input_json_delta", "partial_json": function["arguments"]}
            yield from self._piece(call["index"], empty, piece)

    def _piece(self, kind: Any, empty: dict[str, Any], delta: dict[str, Any]) -> Iterator[Event]:
        if kind != self._open:
            yield from self.close()
            self._index, self._open = self._index + 1, kind
            yield {"type": "content_block_start", "index": self._index, "content_block": empty}
        yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def close(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None


def fold_message(events: list[Event], usage: Usage) -> dict[str, Any]:
    """The response of a request that does not stream."""
    message: dict[str, Any] = dict(events[0]["message"])
    content: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # of each block: joined once, at its end
    for event in events:
        if event["type"] == "content_block_start":
            content.append(dict(event["content_block"]))
            texts.append([])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]].append(delta[DELTA_TEXTS[delta["type"]]])
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for block, parts in zip(content, texts, strict=True):
        text = "".join(parts)
        block |= {"input": _input_of(text)} if block["type"] == "tool_use" else {block["type"]: text}
    return {**message, "content": content}


def _input_of(arguments: str) -> Any:
    """The object as far as it was written, as Anthropic's client reads a stream; of anything else: {}."""
    value = None
    for read in (msgspec.json.decode, loads, partial(from_json, allow_partial=True)):  # the fast one first
        with contextlib.suppress(ValueError, RecursionError, msgspec.DecodeError):
            value = read(arguments or "{}")
            break
    return value if isinstance(value, dict) else {}
