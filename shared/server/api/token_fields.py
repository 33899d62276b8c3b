"""Fields about token ids, log-probabilities of the prompt, and the prompt's length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from diptych.shared.server.api.body import Body
from diptych.shared.server.api.field_types import Id, Key, NumLogprobs, TokenIds
from diptych.shared.server.http.errors import bad_request, first_word
from diptych.shared.types import DiffusionParams

MAX_BIAS = 100
"""OpenAI's limit. Its negative bans a token."""
FIELDS_OF_PARAMS = {"token_ids_logprob": "logprob_token_ids"}
"""Fields of SamplingParams that have another name in these bodies."""


class TruncationFields(Body):
    """What becomes of a long prompt."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] = "left"

    def truncated(self, prompt: list[int], room: int) -> list[int]:
        """The prompt, or its last (truncation_side "right": its first) truncate_prompt_tokens tokens. room:
        the most that fit, which -1 stands for."""
        most = room if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        if most is None or len(prompt) <= most:
            return prompt
        return prompt[:most] if self.truncation_side == "right" else prompt[len(prompt) - most :]


class DiffusionFields(Body):
    """Fields of DiffusionParams."""

    mask_id: int
    block_len: int = 4
    threshold: float = 0.95

    def params(self) -> DiffusionParams:
        try:
            return DiffusionParams(**self.model_dump())
        except ValueError as error:
            raise bad_request(str(error), f"diffusion.{first_word(error)}") from None


class TokenFields(TruncationFields):
    """Names are those of vLLM and SGLang."""

    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: TokenIds | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None  # None: where there is no tokenizer, so no text
    rid: Id | None = None
    extra_key: Key | None = None
    diffusion: DiffusionFields | None = None  # None: token by token

    def token_params(self, num_logprobs: int | None) -> dict[str, Any]:
        """Fields of SamplingParams. num_logprobs: alternatives beside each output token, if any."""
        if self.logprob_token_ids and num_logprobs is None:
            raise bad_request("logprob_token_ids needs logprobs", "logprob_token_ids")
        nums = [num for num in (num_logprobs, self.prompt_logprobs) if num is not None]
        return {
            "return_logprob": bool(nums),
            "top_logprobs_num": max(nums, default=0),
            "logprob_start_len": -1 if self.prompt_logprobs is None else 0,
            "token_ids_logprob": tuple(self.logprob_token_ids or ()),
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": tuple(self.bad_words or ()),
        }

    def namespace(self, cache_salt: str | None) -> str | None:
        """The namespace in the prefix cache that two fields name together."""
        if self.extra_key is None:
            return cache_salt
        return f"{cache_salt or ''}\0{self.extra_key}"


def biases_of(given: Mapping[str, float] | None) -> dict[int, float]:
    """The token ids of a body, which are texts, as numbers. Raises `ApiError` 400."""
    biases: dict[int, float] = {}
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit()) or not math.isfinite(value) or abs(value) > MAX_BIAS:
            raise bad_request(
                f"logit_bias maps token ids to numbers from -100 to 100, got {key!r}: {value!r}",
                "logit_bias",
            )
        biases[int(key)] = -math.inf if value == -MAX_BIAS else value
    return biases
