"""The bodies of requests to OpenAI's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from diptych.shared.server.api.body import Body
from diptych.shared.server.api.field_types import MAX_TOOLS, NumLogprobs
from diptych.shared.server.api.sampling_fields import SamplingFields
from diptych.shared.server.http.errors import bad_request


class Function(Body):
    place = "chat.tools[].function"

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    place = "chat.tools[]"

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedFunction(Body):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Field(min_length=1)]


class AllowedToolChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class FunctionCall(Body):
    place = "chat.messages[].tool_calls[].function"

    name: str
    arguments: str


class ToolCall(Body):
    place = "chat.messages[].tool_calls[]"

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Body):
    place = "chat.messages[].content[]"

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: str  # data:image/...;base64,... : nothing is fetched
    detail: str | None = None


class ImagePart(Body):
    place = "chat.messages[].content[]"

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(Body):
    place = "chat.messages[]"

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatRequest(SamplingFields):
    """/v1/chat/completions."""

    place = "chat"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    return_prompt_token_ids: bool = False
    include_reasoning: Literal[True] = True
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _only_allowed_tools(self) -> ChatRequest:
        """The model is offered the allowed tools alone."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolChoice):
            names = {tool.function.name for tool in choice.allowed_tools.tools}
            missing = names - {tool.function.name for tool in self.tools or ()}
            if missing:
                raise bad_request(
                    f"tool_choice allows {min(missing)!r}, which is not in tools", "tool_choice"
                )
            self.tools = [tool for tool in self.tools or () if tool.function.name in names]
            self.tool_choice = choice.allowed_tools.mode
        return self


def _none_for_false(value: Any) -> Any:
    """Clients that know the chat API send `logprobs: false`."""
    return None if value is False else value


class CompletionRequest(SamplingFields):
    """/v1/completions."""

    place = "completions"

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(_none_for_false)] = None
    suffix: str | None = None
    add_special_tokens: bool = True
