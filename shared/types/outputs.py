"""Outputs of the model, the sampler, a scheduler step, and the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from diptych.shared.types.finish import FinishReason


class TokenLogprob(NamedTuple):
    """The log-probability of one token, the most likely alternatives as (token id, logprob), best first, and
    those of SamplingParams.token_ids_logprob. `logprob` is None for the first prompt token: nothing precedes
    it. `rank` is known for the other prompt tokens."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    asked: tuple[tuple[int, float], ...] = ()
    rank: int | None = None  # its place among all tokens, from 1, in the order of `top`


class LogprobsOutput(NamedTuple):
    """Log-probabilities of n tokens, on the model's device. The columns are the best, descending, and behind
    them the tokens that requests ask for, if any does."""

    token_logprobs: torch.Tensor  # [n] float32
    top_logprobs: torch.Tensor  # [n, k] float32; k may be 0
    top_ids: torch.Tensor  # [n, k] int64


class InputLogprobs(NamedTuple):
    """LogprobsOutput of n prompt tokens, and their ranks."""

    token_logprobs: torch.Tensor
    top_logprobs: torch.Tensor
    top_ids: torch.Tensor
    token_ranks: torch.Tensor  # [n] int64, from 1: places in the order of all tokens, the best first


class LogitsOutput(NamedTuple):
    """What the model runner returns for one ForwardBatch."""

    next_token_logits: torch.Tensor  # [bs, vocab_size] float32, of last tokens (TARGET_VERIFY: of all tokens)
    input_logprobs: InputLogprobs | None = None  # for ForwardBatch.input_logprob_rows
    hidden_states: torch.Tensor | None = None  # [num_tokens, ...], if a draft model reads them


class SampleOutput(NamedTuple):
    """What the sampler returns for a batch of bs rows."""

    next_token_ids: torch.Tensor  # [bs] int64; -1: the row held a NaN, or every token is banned
    logprobs: LogprobsOutput | None = None  # [bs] rows, if a request of the batch needs them


class SpeculationStats(NamedTuple):
    """Counts of speculation, for one request or for all. Each verification gives one bonus token, even if it
    accepts no draft."""

    num_verifications: int = 0  # of a tree, by one forward pass of the target
    num_drafted_tokens: int = 0  # sum of the trees' depths: the most that can be accepted
    num_accepted_tokens: int = 0  # output tokens beyond one per verification

    @property
    def acceptance_length(self) -> float:
        """Drafts accepted per verification, the bonus token not counted."""
        return self.num_accepted_tokens / max(self.num_verifications, 1)

    @property
    def acceptance_length_with_bonus(self) -> float:
        """Output tokens per verification."""
        return self.acceptance_length + (self.num_verifications > 0)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts as a share of the trees' depths."""
        return self.num_accepted_tokens / max(self.num_drafted_tokens, 1)


NO_SPECULATION = SpeculationStats()


@dataclass(slots=True)
class StepOutput:
    """Output of one request in one scheduler step. Exactly one of a request's StepOutputs has a
    `finished_reason`, and it is the last. A request that ends counts `finished_len` output ids.

    Not frozen: one is made for each request and step, and a frozen dataclass takes three times as long."""

    rid: str
    new_token_ids: list[int]
    num_output_tokens: int  # so far, the new ones included
    finished_reason: FinishReason | None = None
    output_logprobs: list[TokenLogprob] = field(default_factory=list)  # one per new id, if requested
    input_logprobs: list[TokenLogprob] = field(default_factory=list)  # all, once the prompt is computed
    embedding: list[float] | None = None  # of a request for one, when it ends
    num_cached_tokens: int = 0
    num_retractions: int = 0
    speculation: SpeculationStats = NO_SPECULATION


@dataclass(frozen=True)
class GenerateOutput:
    """A piece of an answer (`stream`) or a whole one (`generate`)."""

    rid: str
    index: int  # which of the n samples
    text: str  # stream: the new text; generate: all of it
    output_ids: list[int]  # stream: the new ids; generate: all of them
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    num_retractions: int = 0
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    speculation: SpeculationStats = NO_SPECULATION
    weight_version: int = 0  # updates of the weights before its last token
