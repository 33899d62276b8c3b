"""A step's batch: lists of requests for the scheduler (ScheduleBatch), tensors for the device
(ForwardBatch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from diptych.shared.types.outputs import LogitsOutput, TokenLogprob
from diptych.shared.types.req import Req


class ForwardMode(Enum):
    """What a batch computes."""

    EXTEND = auto()  # each request computes one or more new tokens on top of a cached prefix
    DECODE = auto()  # each request computes exactly one token
    MIXED = auto()  # some rows extend, others decode (as an extension by one token)
    IDLE = auto()  # no token: a rank without work that still enters collectives
    TARGET_VERIFY = auto()  # each request computes a tree of drafted tokens under a tree mask

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    @property
    def is_prefill(self) -> bool:
        """Holds prompt tokens (EXTEND or MIXED; not TARGET_VERIFY)."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass
class ScheduleBatch:
    """The scheduler's view: lists of requests on the CPU. `reqs` is never shared with another batch."""

    reqs: list[Req]
    forward_mode: ForwardMode
    num_extend_reqs: int = 0  # the first so many requests extend, the others decode
    out_cache_loc: torch.Tensor | None = None  # int64 [num_tokens]; set once memory is allocated
    num_steps: int = (
        1  # DECODE: tokens of each request; out_cache_loc has the slots of one step after another
    )

    @property
    def batch_size(self) -> int:
        return len(self.reqs)

    @property
    def slots_of_steps(self) -> torch.Tensor:
        """[num_steps, bs], of a DECODE batch."""
        assert self.out_cache_loc is not None
        return self.out_cache_loc.view(self.num_steps, self.batch_size)


@dataclass(frozen=True)
class ForwardBatch:
    """One step, as tensors on the model's device. Complete when it is made; it does not change afterwards.

    bs requests; request i contributes `extend_seq_lens[i]` tokens (DECODE: 1), in order, so all
    per-token tensors are ragged: request i's tokens are [extend_start_loc[i], + extend_seq_lens[i]).
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    req_pool_indices: torch.Tensor  # [bs] int64, rows of req_to_token
    seq_lens: torch.Tensor  # [bs] int64, tokens with KV after this step (those of this step included)
    out_cache_loc: torch.Tensor  # [num_tokens] int64, slot where each token's KV goes
    extend_seq_lens: torch.Tensor  # [bs] int64, tokens computed in this step
    extend_start_loc: torch.Tensor  # [bs] int64, exclusive cumulative sum of extend_seq_lens
    seq_lens_cpu: tuple[int, ...]  # the same numbers on the CPU
    extend_seq_lens_cpu: tuple[int, ...]
    rows_cpu: tuple[int, ...] | None = None  # req_pool_indices on the CPU, if they are known
    # TARGET_VERIFY, and EXTEND with block diffusion: bool, for each request the row-major block
    # [extend_seq_len, seq_len] of visible positions (True: visible), concatenated. None: causal.
    custom_mask: torch.Tensor | None = None
    # A mask of fixed shape instead: bool [bs, n, m], where every request computes n tokens and m >= n. Each
    # token sees all positions before the request's last m, and of these the ones with True. Columns before
    # the start of a request that is shorter than m are ignored.
    tree_mask: torch.Tensor | None = None
    # Rows (token indices of this batch) whose logits give a prompt token's log-probability, and that token.
    input_logprob_rows: torch.Tensor | None = None  # [n] int64
    input_logprob_ids: torch.Tensor | None = None  # [n] int64
    num_top_input_logprobs: int = 0
    input_asked_ids: torch.Tensor | None = None  # [n, m] int64: tokens asked for beside the best; -1: none
    # Columns of the logits that are tokens. Log-probabilities are normalised over these. None: all columns.
    num_token_ids: int | None = None
    # [bs] int64: leading tokens of each request that are no padding. None: all.
    num_kept: torch.Tensor | None = None
    # Rows (token indices of this batch) whose input to layer 0 is given, and this input. None: all inputs are
    # embeddings of input_ids.
    embed_rows: torch.Tensor | None = None  # [n] int64
    embeds: torch.Tensor | None = None  # [n, k * hidden_size], see `PromptEmbeds.rows`
    # What tokens rotate by, int64 [num_tokens], or [3, num_tokens]: by time, row and column. None: positions.
    rope_positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_tokens, bs = self.input_ids.shape[0], self.req_pool_indices.shape[0]
        for name, size in (
            ("positions", num_tokens),
            ("out_cache_loc", num_tokens),
            ("seq_lens", bs),
            ("extend_seq_lens", bs),
            ("extend_start_loc", bs),
        ):
            assert getattr(self, name).shape == (size,), f"{name}: {getattr(self, name).shape}, not ({size},)"
        assert len(self.seq_lens_cpu) == bs
        assert len(self.extend_seq_lens_cpu) == bs
        assert sum(self.extend_seq_lens_cpu) == num_tokens
        if self.tree_mask is not None:
            assert self.custom_mask is None
            assert self.tree_mask.shape[:2] == (bs, num_tokens // max(bs, 1)), f"{self.tree_mask.shape}"

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_cpu)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def model_positions(self) -> torch.Tensor:
        """The positions that a model takes."""
        return self.positions if self.rope_positions is None else self.rope_positions

    @property
    def last_token_rows(self) -> torch.Tensor:
        """[bs] int64, the row of each request's last token."""
        num_tokens = self.extend_seq_lens if self.num_kept is None else self.num_kept
        return self.extend_start_loc + num_tokens - 1

    @property
    def sampled_positions(self) -> torch.Tensor:
        """int64, one for each row of the logits: the position of the token after which one is sampled."""
        return self.seq_lens - 1 if self.forward_mode.is_prefill else self.positions


class BatchResult(NamedTuple):
    """Results of a batch on the CPU, an entry for each request."""

    # Sampled tokens. Behind a chunk that is not the prompt's last they have no meaning, or there are none.
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob]]  # of these tokens; empty lists if no request asks for them
    # The step of the model, for a drafter that continues from it in the same step.
    forward_batch: ForwardBatch | None = None
    logits_output: LogitsOutput | None = None

    @property
    def tokens(self) -> Iterator[tuple[list[int], list[TokenLogprob]]]:
        """New tokens and their log-probabilities, for one request after the other."""
        return zip(self.token_ids, self.logprobs)


@dataclass(frozen=True)
class SamplingBatchInfo:
    """The sampling parameters of a batch of bs rows, as tensors on the logits' device."""

    temperatures: torch.Tensor  # [bs] float32; greedy rows hold 1.0
    top_ks: torch.Tensor  # [bs] int64; "keep all" is vocab_size; greedy rows hold 1
    top_ps: torch.Tensor  # [bs] float32
    min_ps: torch.Tensor  # [bs] float32
    seeds: torch.Tensor  # [bs] int64
    is_greedy: torch.Tensor  # [bs] bool
    is_all_greedy: bool
    needs_filter: bool  # some row has a top_k, top_p or min_p that can drop a token

    # None where no row needs it:
    is_sequential: torch.Tensor | None = None  # [bs] bool: top_p is a share of what top_k keeps
    logit_bias: torch.Tensor | None = None  # [bs, vocab_size] float32, added
    banned: torch.Tensor | None = None  # [bs, vocab_size] bool, set to -inf
    vocab_mask: torch.Tensor | None = None  # [bs, ceil(vocab_size / 32)] int32 bits, low bit first; 0: banned
    output_counts: torch.Tensor | None = None  # [bs, vocab_size] int32, how often in the output
    prompt_mask: torch.Tensor | None = None  # [bs, vocab_size] bool, occurs in the prompt
    frequency_penalties: torch.Tensor | None = None  # [bs] float32
    presence_penalties: torch.Tensor | None = None  # [bs] float32
    repetition_penalties: torch.Tensor | None = None  # [bs] float32
    processors: tuple[
        Any, ...
    ] = ()  # diptych.shared.sampling.processors.ProcessorRows: functions that run on the CPU
    return_logprob: bool = False
    num_top_logprobs: int = 0  # maximum over the rows
    asked_ids: torch.Tensor | None = None  # [bs, m] int64: tokens asked for beside the best; -1: none
