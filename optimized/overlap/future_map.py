"""Future tokens: names on the CPU, values on the device.

A batch is launched before the one before it has ended. The token that it decodes from exists on the device
only, or not even there: so its input id is the name of a place in a ring, where the device looks it up when
the batch starts. A name is the place counted from the ring's end, as Python does it, so it is below zero; and
a batch of names becomes a batch of tokens by one indexing. All of this runs on one stream, in the order of
the launches.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shared.types import ForwardBatch, ForwardMode, SamplingBatchInfo

NUM_BATCHES = 4
"""Batches that the ring holds. Two would do: a place is read by the next batch or by none."""


class FutureMap:
    """Places are counted from 1. A batch's places follow each other: one that would begin beyond `limit`
    begins at 1, and one that begins before it may end behind it."""

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
        """The first of so many places, in which the batch's tokens will be."""
        assert batch_size <= self.max_batch_size, f"{batch_size} requests"
        first = self._num_taken + 1
        self._num_taken += batch_size
        if self._num_taken >= self.limit:
            self._num_taken = 0
        return first

    def resolve(self, forward_batch: ForwardBatch, has_ids: bool = True) -> ForwardBatch:
        """The batch with tokens for names. `has_ids`: some of its input ids are tokens."""
        if forward_batch.forward_mode is ForwardMode.EXTEND:
            return forward_batch  # prompts are known
        ids = forward_batch.input_ids
        tokens = self.token_ids[ids.clamp(max=-1) if has_ids else ids]
        return replace(forward_batch, input_ids=torch.where(ids < 0, tokens, ids) if has_ids else tokens)

    def store(self, first: int, next_token_ids: torch.Tensor) -> None:
        """An id that is none (-1, after NaN) becomes 0: its request has ended, and the row
        that decodes from it is not read."""
        places = self.token_ids[first : first + next_token_ids.shape[0]]
        torch.clamp(next_token_ids, min=0, out=places)

    # --8<-- [end:future-places]


def count_in_flight(info: SamplingBatchInfo, named: ForwardBatch, resolved: ForwardBatch) -> None:
    """Add to `output_counts` the tokens that the CPU did not have when it made them: those that the batch
    decodes from. `named` has their names, `resolved` the tokens."""
    if info.output_counts is None:
        return
    rows = named.last_token_rows
    is_in_flight = named.input_ids[rows] < 0
    token_ids = torch.where(is_in_flight, resolved.input_ids[rows], 0)
    counts = is_in_flight[:, None].to(info.output_counts.dtype)
    info.output_counts.scatter_add_(1, token_ids[:, None], counts)
