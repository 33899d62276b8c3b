"""The bodies of requests to OpenAI's routes, and what sampling takes."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from diptych.shared.server.api.body import Body
from diptych.shared.server.http.errors import bad_request, first_word
from diptych.shared.server.http.limits import MAX_ID_CHARS, MAX_KEY_CHARS, MAX_NAMES, MAX_PRIORITY
from diptych.shared.types import SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 2048
MAX_SAMPLES = 256

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
TokenIds = Annotated[list[int], Field(max_length=MAX_NAMES)]
Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]


class StreamOptions(Body):
    place = "chat.stream_options"

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Schema = str | dict[str, Any]
Choices = Annotated[list[str], Field(min_length=1)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class GrammarFields(Body):
    """Constraints on the output under the names that public servers have for them. At most one is given."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    response_format: ResponseFormat | None = None

    def grammar_params(self) -> dict[str, Any]:
        """The field of SamplingParams that the body asks for; 400 for more than one."""
        found: list[tuple[str, Any]] = [
            ("json_schema", self.guided_json),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("ebnf", self.guided_grammar),
            ("regex", self.regex),
            ("ebnf", self.ebnf),
        ]
        given = self.structured_outputs
        if given is not None:
            found += [
                ("json_schema", given.json_),
                ("json_object", given.json_object or None),
                ("regex", given.regex),
                ("choice", given.choice),
                ("ebnf", given.grammar),
                ("structural_tag", given.structural_tag),
            ]
        shape = self.response_format
        if shape is not None and shape.type == "json_object":
            found.append(("json_object", True))
        elif shape is not None and shape.type == "json_schema":
            if shape.json_schema is None or shape.json_schema.schema_ is None:
                raise bad_request("response_format json_schema needs json_schema.schema", "response_format")
            found.append(("json_schema", shape.json_schema.schema_))
        asked = [(name, value) for name, value in found if value is not None]
        if len(asked) > 1:
            names = " and ".join(name for name, _ in asked)
            raise bad_request(f"{names}: only one constraint on the output can be given")
        return {name: tuple(value) if name == "choice" else value for name, value in asked}


class SamplingFields(GrammarFields):
    """Fields of sampling that chat and completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    stop_regex: str | list[str] | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    priority: Priority = 0
    routing_key: Key | None = None
    cache_salt: Key | None = None
    return_tokens_as_token_ids: bool = False

    def sampling_params(self, max_new_tokens: int, num_logprobs: int | None, **more: Any) -> SamplingParams:
        """Return the parameters for the engine. `num_logprobs`: alternatives beside each token; None: no
        log-probabilities."""
        if self.best_of is not None and self.best_of != 1:
            raise bad_request(f"best_of must be 1, got {self.best_of}", "best_of")
        if self.min_tokens > max_new_tokens:
            raise bad_request(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({max_new_tokens})", "min_tokens"
            )
        more = {**self.grammar_params(), **more}
        try:
            return SamplingParams(
                max_new_tokens=max_new_tokens,
                min_new_tokens=self.min_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k if self.top_k != 0 else -1,
                min_p=self.min_p,
                n=self.n,
                stop=texts_of(self.stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                stop_regex=texts_of(self.stop_regex),
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self._logit_bias(),
                ignore_eos=self.ignore_eos,
                skip_special_tokens=self.skip_special_tokens,
                no_stop_trim=self.include_stop_str_in_output or self.no_stop_trim,
                return_logprob=num_logprobs is not None,
                top_logprobs_num=num_logprobs or 0,
                **more,
            )
        except ValueError as error:
            name = first_word(error)
            raise bad_request(str(error), name if name in type(self).model_fields else None) from None

    def _logit_bias(self) -> dict[int, float]:
        biases: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit()) or not math.isfinite(value) or abs(value) > 100:
                raise bad_request(
                    f"logit_bias maps token ids to numbers from -100 to 100, got {key!r}: {value!r}",
                    "logit_bias",
                )
            biases[int(key)] = -math.inf if value == -100 else value
        return biases


def texts_of(value: str | list[str] | None) -> tuple[str, ...]:
    """List the texts of a field that takes one text or a list of them."""
    return (value,) if isinstance(value, str) else tuple(value or ())


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
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool = True
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


class CompletionRequest(SamplingFields):
    """/v1/completions."""

    place = "completions"

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    return_token_ids: bool | None = None  # None: where there is no tokenizer, so no text
