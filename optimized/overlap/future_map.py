"""Future tokens: names on the CPU, values on the device.

A batch is launched before the previous one has ended. The token that it decodes from is only on the device,
or not yet computed. So its input id is the name of a place in a ring, which the device reads when the batch
starts. A name is a negative index from the ring's end, so one indexing operation replaces a batch of names by
tokens. All of this runs on one stream, in the order of the launches.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.types import ForwardBatch, ForwardMode, SamplingBatchInfo

NUM_BATCHES = 4
"""The number of batches in the ring. Two suffice, because only the next batch reads a place."""


class FutureMap:
    """A ring of future tokens. Places are counted from 1. The places of a batch are consecutive. If they
    would begin beyond `limit`, they begin at 1; if they begin before it, they may end beyond it."""

    def __init__(self, max_batch_size: int, device: torch.device, limit: int | None = None) -> None:
        self.limit = NUM_BATCHES * max_batch_size if limit is None else limit
        assert self.limit >= 2 * max_batch_size, f"{self.limit} places do not hold two of {max_batch_size}"
        self.max_batch_size = max_batch_size
        self.size = self.limit + max_batch_size + 1
        self.token_ids = torch.zeros(self.size, dtype=torch.int64, device=device)
        self._num_taken = 0

    def name_of(self, place: int) -> int:
        return place - self.size

    # --8<-- [start:future-places]
    def take(self, batch_size: int) -> int:
        """Reserve consecutive places for a batch's tokens; returns the first."""
        assert batch_size <= self.max_batch_size, f"{batch_size} requests"
        first = self._num_taken + 1
        self._num_taken += batch_size
        if self._num_taken >= self.limit:
            self._num_taken = 0
        return first

    def resolve(self, forward_batch: ForwardBatch, has_ids: bool = True) -> ForwardBatch:
        """The batch with tokens in place of names. `has_ids`: some ids are tokens."""
        if forward_batch.forward_mode is ForwardMode.EXTEND:
            return forward_batch  # prompts are known
        ids = forward_batch.input_ids
        tokens = self.token_ids[ids.clamp(max=-1) if has_ids else ids]
        return replace(forward_batch, input_ids=torch.where(ids < 0, tokens, ids) if has_ids else tokens)

    def store(self, first: int, next_token_ids: torch.Tensor) -> None:
        """Store tokens. An id of -1, after NaN, becomes 0: its request has ended, and
        the row that decodes from it is not read."""
        places = self.token_ids[first : first + next_token_ids.shape[0]]
        torch.clamp(next_token_ids, min=0, out=places)

    # --8<-- [end:future-places]


def count_in_flight(info: SamplingBatchInfo, named: ForwardBatch, resolved: ForwardBatch) -> None:
    """Add the tokens that the batch decodes from to `output_counts`, which the CPU made without them. `named`
    has their names, `resolved` the tokens."""
    if info.output_counts is None:
        return
    rows = named.last_token_rows
    is_in_flight = named.input_ids[rows] < 0
    token_ids = torch.where(is_in_flight, resolved.input_ids[rows], 0)
    counts = is_in_flight[:, None].to(info.output_counts.dtype)
    info.output_counts.scatter_add_(1, token_ids[:, None], counts)
