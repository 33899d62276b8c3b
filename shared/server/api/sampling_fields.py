"""What sampling takes, in the bodies of OpenAI's routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from diptych.shared.loading.sampling_defaults import NAMES
from diptych.shared.server.api.body import Body
from diptych.shared.server.api.field_types import MAX_SAMPLES, Int64, Key, Priority, TokenIds
from diptych.shared.server.api.grammar_fields import GrammarFields
from diptych.shared.server.api.token_fields import FIELDS_OF_PARAMS, TokenFields, biases_of
from diptych.shared.server.http.errors import bad_request, first_word
from diptych.shared.types import SamplingParams


class StreamOptions(Body):
    place = "chat.stream_options"

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(GrammarFields, TokenFields):
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
    filter_order: str = "joint"
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

    def sampling_params(
        self, max_new_tokens: int, num_logprobs: int | None, defaults: Mapping[str, Any], **more: Any
    ) -> SamplingParams:
        """Return the parameters for the engine. `num_logprobs`: alternatives beside each token; None: no
        log-probabilities. `defaults`: the model's, of fields that the body leaves open."""
        if self.best_of is not None and self.best_of != 1:
            raise bad_request(f"best_of must be 1, got {self.best_of}", "best_of")
        if (self.stream_options or StreamOptions()) != StreamOptions() and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "prompt_logprobs come with whole answers, not with stream=true", "prompt_logprobs"
            )
        if self.min_tokens > max_new_tokens:
            raise bad_request(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({max_new_tokens})", "min_tokens"
            )
        more = {**self.grammar_params(), **self.token_params(num_logprobs), **more}
        chosen: dict[str, Any] = {name: getattr(self, name) for name in NAMES}
        chosen |= {name: defaults[name] for name in defaults.keys() - self.model_fields_set}
        if chosen["top_k"] == 0:
            chosen["top_k"] = -1
        try:
            return SamplingParams(
                max_new_tokens=max_new_tokens,
                min_new_tokens=self.min_tokens,
                **chosen,
                filter_order=self.filter_order,
                n=self.n,
                stop=texts_of(self.stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                stop_regex=texts_of(self.stop_regex),
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=biases_of(self.logit_bias),
                ignore_eos=self.ignore_eos,
                skip_special_tokens=self.skip_special_tokens,
                no_stop_trim=self.include_stop_str_in_output or self.no_stop_trim,
                **more,
            )
        except ValueError as error:
            name = FIELDS_OF_PARAMS.get(first_word(error), first_word(error))
            raise bad_request(str(error), name if name in type(self).model_fields else None) from None


def texts_of(value: str | list[str] | None) -> tuple[str, ...]:
    """List the texts of a field that takes one text or a list of them."""
    return (value,) if isinstance(value, str) else tuple(value or ())
