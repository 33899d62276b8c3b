"""Drafting a whole block in one pass over the target's hidden states: DFlash."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.speculation.drafter_base import BaseDFlashDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req


class DFlashDrafter(BaseDFlashDrafter):
    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.make_attention(self.draft_config.model, req_to_token_pool, num_slots)

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        assert hidden_states is not None
        self._store(forward_batch, hidden_states)

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        return self._draft_block(batch, shape)
