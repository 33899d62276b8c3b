"""Contract of the LoRA pool: weights of adapters, and which request has which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from diptych.shared.interfaces.model import CausalLM
from diptych.shared.types import ForwardBatch
from diptych.shared.types.lora import LoraAdapter

NO_ADAPTER = -1
"""The slot of a request without an adapter."""


class LoraPool(ABC):
    """The weights of the adapters of a batch, each in one of `num_slots` slots.

    The constructor changes the model: in every decoder layer the linear layers of
    `diptych.shared.loading.lora_adapter`'s `adaptable_modules` add scale * B (A x) to the output for each
    token x whose request has an adapter with weights for this layer. All other outputs stay as they were.

    A request is known by its row of req_to_token. Any ForwardBatch has these rows, so the pool needs nothing
    else: plain steps, steps that verify drafts, and padding (row 0, never an adapter) are alike.
    """

    models: str = "reference"  # the implementation of `models` that it changes
    num_slots: int
    max_rank: int

    @abstractmethod
    def __init__(
        self, model: CausalLM, num_slots: int, max_rank: int, num_rows: int, max_num_tokens: int
    ) -> None:
        """model: on its device, with weights. num_rows: of req_to_token, row 0 not counted. max_num_tokens:
        of the largest step."""

    @abstractmethod
    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """The slot has this adapter, of rank max_rank at most, from the next `prepare` on; what was there
        before has no effect any more, whatever its rank. Steps under way keep what they were prepared with.
        `ValueError` for a module that the model does not have."""

    @abstractmethod
    def assign(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """From the next `prepare` on, the requests in these rows have the adapters of these slots, or
        NO_ADAPTER. No step under way has a request in one of the rows."""

    @abstractmethod
    def prepare(self, batch: ForwardBatch) -> None:
        """Called before each forward pass, in the order of the passes. The batch may be padded afterwards,
        behind its tokens."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of device memory that the weights take."""


def token_slots(slot_of_row: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """[num_tokens], the slot of each token's request. slot_of_row: for each row of req_to_token."""
    slots = slot_of_row[batch.req_pool_indices]
    if batch.num_tokens == batch.batch_size:
        return slots
    return slots.repeat_interleave(batch.extend_seq_lens, output_size=batch.num_tokens)
