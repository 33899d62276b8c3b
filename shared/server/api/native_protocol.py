"""The bodies of the routes beside OpenAI's: native generation, tokens and administration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from diptych.shared.server.api.body import Body
from diptych.shared.server.api.field_types import MAX_SAMPLES, Id, Int64, Key, NumLogprobs, Priority, TokenIds
from diptych.shared.server.api.grammar_fields import Choices, Schema
from diptych.shared.server.api.protocol import Message, Tool
from diptych.shared.server.api.sampling_fields import texts_of
from diptych.shared.server.api.token_fields import DiffusionFields, biases_of
from diptych.shared.server.http.limits import MAX_ID_CHARS


class ConversationFields(Body):
    """What makes a prompt of messages."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(ConversationFields):
    """/tokenize: a text, or several, or messages through the chat template."""

    place = "tokenize"

    model: str | None = None
    prompt: str | list[str] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ApplyTemplateRequest(ConversationFields):
    """/apply-template: the text of the prompt that messages make."""

    place = "apply-template"


class DetokenizeRequest(Body):
    """/detokenize."""

    place = "detokenize"

    model: str | None = None
    tokens: list[int] | list[list[int]]
    skip_special_tokens: bool = False


class NativeSamplingParams(Body):
    """`sampling_params` of /generate: fields of SamplingParams."""

    place = "generate.sampling_params"

    max_new_tokens: Annotated[int, Field(ge=0)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    filter_order: str = "joint"
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
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
        found = self.model_dump(exclude={"sampling_seed", "seed"})
        return {
            **found,
            "stop": texts_of(self.stop),
            "stop_regex": texts_of(self.stop_regex),
            "logit_bias": biases_of(self.logit_bias),
        }


class NativeRequest(Body):
    """/generate, in the manner of SGLang's native endpoint: streamed texts are cumulative. Where a field
    takes a list, it has an entry for each prompt."""

    place = "generate"

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    input_embeds: list[list[float]] | list[list[list[float]]] | None = None
    sampling_params: NativeSamplingParams | list[NativeSamplingParams] = NativeSamplingParams()
    stream: bool = False
    return_logprob: bool | list[bool] = False
    top_logprobs_num: NumLogprobs | list[NumLogprobs] = 0
    logprob_start_len: int | list[int] = -1
    token_ids_logprob: TokenIds | list[TokenIds] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    priority: Priority = 0
    routing_key: Key | None = None
    cache_salt: Key | None = None
    extra_key: Key | None = None
    diffusion: DiffusionFields | None = None
    lora_path: str | list[str | None] | None = None  # SGLang's word for the name of a loaded adapter
    rid: Id | list[Id] | None = None  # echoed, and a name for /abort_request


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


class ProfileRequest(Body):
    """/start_profile. nvtx: mark spans for tools of CUDA too."""

    num_steps: Annotated[int, Field(ge=0, le=2**31)] = 0
    nvtx: bool = False
