"""One request's state, from submission to the last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from diptych.shared.types.diffusion import DiffusionParams
from diptych.shared.types.finish import FinishReason
from diptych.shared.types.lora import LoraAdapter
from diptych.shared.types.outputs import NO_SPECULATION, SpeculationStats, StepOutput, TokenLogprob
from diptych.shared.types.prompt_embeds import PromptEmbeds
from diptych.shared.types.sampling_params import SamplingParams

NO_SLOTS = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(eq=False)
class Req:
    """A request. Between steps a live request has P + O tokens (prompt, output) and
    `kv_committed_len` = P + O - 1 entries in the KV pool: the newest token has no KV yet. (With `diffusion`
    P + O entries.)

    Written once at submission: the first group. Written by the scheduler: the rest.
    Two requests are equal only when they are the same object.
    """

    rid: str  # its name, distinct among live requests
    origin_input_ids: list[int]  # the prompt
    sampling_params: SamplingParams
    seed: int  # never None: the engine chooses one
    eos_token_ids: frozenset[int] = frozenset()  # each ends the request, unless ignore_eos
    extra_key: Any = None  # hashable, namespace in the prefix cache: different keys never share a prefix
    priority: int = 0  # larger is more important
    routing_key: str | None = None  # for the policy of that name
    prefill_server: str | None = None  # that computes the prompt, signed by the router; of a decode server
    grammar: Any = None  # a diptych.shared.interfaces.Grammar; None: all tokens are allowed
    lora: LoraAdapter | None = None  # None: the model alone
    diffusion: DiffusionParams | None = None  # None: token by token
    embeds: PromptEmbeds | None = None  # rows that are given in place of the prompt's embeddings
    is_pooling: bool = False  # no tokens are wanted, but the last hidden state of the prompt
    logit_processor: Any = None  # a function of outputs and logits, see shared/sampling/processors.py
    arrival_time: float = 0.0  # seconds, by the scheduler's clock
    max_new_tokens: int = -1  # sampling_params.max_new_tokens, clamped so that prompt + output fits

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprob] = field(default_factory=list)  # one per output id, if requested
    num_reported: int = 0  # output ids that were in a StepOutput
    embedding: list[float] | None = None  # with is_pooling, once the prompt is computed
    input_logprobs: list[TokenLogprob] = field(default_factory=list)  # of positions logprob_start_len..P-1

    # The current extension: tokens that have KV after it, and slots of the tokens that have KV before it.
    fill_ids: list[int] = field(default_factory=list)  # origin + output, cut off at the chunk's end
    prefix_indices: torch.Tensor = NO_SLOTS  # int64 slots of fill_ids[:len]
    extend_input_len: int = 0  # len(fill_ids) - len(prefix_indices)

    # Memory.
    req_pool_idx: int | None = None  # row of req_to_token; None while the request owns no memory
    kv_matched_len: int = 0  # tokens found in the prefix cache at this admission
    last_node: Any = None  # the prefix cache's node that this request locks
    cache_protected_len: int = 0  # the prefix cache owns the slots of tokens [0, this)
    kv_committed_len: int = 0  # KV entries that are valid
    kv_allocated_len: int = 0  # allocated KV entries: more than committed while speculating

    num_retractions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_verifications: int = 0  # steps in which drafts were verified
    num_drafted_tokens: int = 0  # sum of the usable depths of their trees
    num_accepted_tokens: int = 0  # output tokens beyond one per step
    queue_start_time: float = 0.0  # when it joined the waiting queue, by the scheduler's clock
    run_start_time: float | None = None  # when it was first scheduled

    output_scan: Any = None  # with stop_regex: an OutputScan, what the searches so far have found
    to_finish: FinishReason | None = None  # requested end, applied at the next finish check
    finished_reason: FinishReason | None = None
    finished_len: int | None = None  # output ids that count; later ones were produced in the same step

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            self.max_new_tokens = self.sampling_params.max_new_tokens

    @property
    def finished(self) -> bool:
        return self.finished_reason is not None

    @property
    def needs_output(self) -> bool:
        """Whether each token is sampled by something on the CPU that reads all tokens before."""
        return (
            self.grammar is not None
            or self.logit_processor is not None
            or self.sampling_params.bans_sequences
        )

    @property
    def num_tokens(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def all_ids(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    @property
    def key_ids(self) -> list[int]:
        """`all_ids` as the prefix cache compares them: rows that were given are known by their content."""
        prompt = self.origin_input_ids if self.embeds is None else self.embeds.key_ids
        return prompt + self.output_ids

    @property
    def fill_key_ids(self) -> list[int]:
        """`fill_ids` as the prefix cache compares them."""
        return self.fill_ids if self.embeds is None else self.key_ids[: len(self.fill_ids)]

    @property
    def rope_delta(self) -> int:
        """What is added to the position of an output token: it rotates by the sum."""
        return 0 if self.embeds is None else self.embeds.rope_delta

    @property
    def prompt_text_ids(self) -> list[int]:
        """The prompt as text; empty where it came as rows alone."""
        return self.origin_input_ids if self.embeds is None or self.embeds.has_token_ids else []

    @property
    def next_input_logprob(self) -> int | None:
        """The first prompt position whose log-probability is requested and not known yet; None: none is
        left. Known values survive a retraction."""
        start = self.sampling_params.logprob_start_len
        position = start + len(self.input_logprobs)
        return position if start >= 0 and position < len(self.origin_input_ids) else None

    @property
    def max_prefix_len(self) -> int:
        """The longest prefix that may come from the cache. At least one token is always computed, and so is
        each position whose logits give a prompt log-probability (of the next token)."""
        longest = self.num_tokens - 1
        if self.next_input_logprob is not None:
            longest = min(longest, max(self.next_input_logprob - 1, 0))
        return longest

    def step_output(self) -> StepOutput:
        """The output ids that no step has reported yet, and the finish reason if any."""
        start, self.num_reported = self.num_reported, len(self.output_ids)
        return StepOutput(
            rid=self.rid,
            new_token_ids=self.output_ids[start:],
            num_output_tokens=self.num_reported,
            finished_reason=self.finished_reason,
            output_logprobs=self.output_logprobs[start:] if self.output_logprobs else [],
            input_logprobs=self.input_logprobs,
            embedding=self.embedding,
            num_cached_tokens=self.num_cached_tokens,
            num_retractions=self.num_retractions,
            speculation=self.speculation if self.num_verifications else NO_SPECULATION,
        )

    def drop_unreported(self) -> None:
        """Remove the output ids that no step has reported: whether they end the request is not known."""
        del self.output_ids[self.num_reported :], self.output_logprobs[self.num_reported :]

    @property
    def speculation(self) -> SpeculationStats:
        return SpeculationStats(self.num_verifications, self.num_drafted_tokens, self.num_accepted_tokens)

    def reset_for_retraction(self) -> None:
        """Reset everything about memory; tokens, log-probabilities and seed stay."""
        self.fill_ids = []
        self.prefix_indices = NO_SLOTS
        self.extend_input_len = 0
        self.req_pool_idx = None
        self.kv_matched_len = 0
        self.last_node = None
        self.cache_protected_len = 0
        self.kv_committed_len = 0
        self.kv_allocated_len = 0
        self.num_retractions += 1
