"""A round of speculation between its launch and the processing of its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from diptych.optimized.overlap.in_flight import InFlight
from diptych.shared.speculation.node_sampling import EarlyBans
from diptych.shared.types import DraftShape, ForwardBatch, LogprobsOutput, SamplingBatchInfo


class Starts(NamedTuple):
    """The start of each request's round, as known to the CPU at the launch."""

    rows: torch.Tensor  # [bs] int64, of req_to_token
    kv_lens: torch.Tensor  # [bs] int64, without what a round in flight will add
    last_starts: torch.Tensor  # [bs] int64: a request that would start behind this has ended
    places: torch.Tensor  # [bs] int64, of what is in flight; 0: nothing
    is_round: torch.Tensor  # [bs] int64, 1: a round is in flight, and adds KV
    root_ids: torch.Tensor  # [bs] int64, where nothing is in flight
    slots: torch.Tensor  # [bs, n] int64, of the positions from kv_lens on
    bounds: tuple[int, ...]  # upper bounds of the lengths with KV


class KeptRows(NamedTuple):
    """Arguments of the drafter's `extend` for a round."""

    forward_batch: ForwardBatch
    hidden_states: torch.Tensor | None
    next_token_ids: torch.Tensor


@dataclass
class RoundInFlight(InFlight):
    shape: DraftShape
    starts: Starts = field(init=False)
    info: SamplingBatchInfo = field(init=False)  # for the token behind each request's newest one on the CPU
    bans: EarlyBans | None = field(default=None, init=False)
    kept: KeptRows | None = field(default=None, init=False)  # for a drafter that is called once it is known

    @property
    def max_kept(self) -> int:
        return max_kept(self.shape)


class Outcome(NamedTuple):
    """The results that are copied to the CPU."""

    numbers: torch.Tensor  # [bs, max_kept + 2] int64: tokens, how many of them count, depth of the tree
    logprobs: LogprobsOutput | None  # of max_kept tokens for each request


def max_kept(shape: DraftShape) -> int:
    """The most tokens that a round gives."""
    return min(shape.num_steps + 1, shape.num_draft_tokens)
