"""The bodies of the routes beside OpenAI's: native generation, tokens and administration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from diptych.shared.server.api.body import Body
from diptych.shared.server.api.protocol import (
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    Choices,
    Id,
    Int64,
    Message,
    Priority,
    Schema,
    TokenIds,
    texts_of,
)
from diptych.shared.server.http.limits import MAX_ID_CHARS


class TokenizeRequest(Body):
    """/tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """/detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


class NativeSamplingParams(Body):
    """`sampling_params` of /generate: fields of SamplingParams."""

    max_new_tokens: Annotated[int, Field(ge=0)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: Int64 | None = None
    sampling_seed: Int64 | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    json_schema: Schema | None = None
    json_object: bool = False
    regex: str | None = None
    ebnf: str | None = None
    choice: Choices | None = None
    structural_tag: str | None = None

    def fields(self) -> dict[str, Any]:
        """Fields of SamplingParams; the seed is the request's."""
        found = self.model_dump(exclude={"sampling_seed", "seed", "stop", "stop_regex"})
        return {**found, "stop": texts_of(self.stop), "stop_regex": texts_of(self.stop_regex)}


class NativeRequest(Body):
    """/generate, in the manner of SGLang's native endpoint: streamed texts are cumulative."""

    text: str | None = None
    input_ids: list[int] | None = None
    input_embeds: list[list[float]] | None = None
    sampling_params: NativeSamplingParams = NativeSamplingParams()
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    logprob_start_len: int = -1
    priority: Priority = 0
    lora_path: str | None = None  # SGLang's word for the name of a loaded adapter
    rid: Id | None = None  # echoed, and a name for /abort_request


class LoadLoraRequest(Body):
    """/load_lora_adapter"""

    lora_name: Id
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadLoraRequest(Body):
    """/unload_lora_adapter"""

    lora_name: Id


class AbortRequest(Body):
    """/abort_request: one of the two."""

    rid: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    abort_all: bool = False


class PauseRequest(Body):
    """/pause_generation"""

    mode: Literal["in_place", "retract", "abort"] = "in_place"
