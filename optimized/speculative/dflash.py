"""Drafting a whole block in one pass over the target's hidden states: DFlash.

Differs from reference: a draft is one CUDA graph, and so is the extension by what was accepted, for each of a
list of batch sizes (draft_graphs.py). Nothing of a request is kept but KV. So a round waits for no result,
and the next one can be launched before it ends. Assumes attention and tree ops that can be captured;
otherwise, and for larger batches, kernels are launched one by one.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.graphs.draft_graphs import GraphDrafter
from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.speculation.drafter_base import BaseDFlashDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch


class DFlashDrafter(GraphDrafter, BaseDFlashDrafter):
    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.make_attention(self.draft_config.model, req_to_token_pool, num_slots)
        options: Any = {"dtype": self.parts.dtype, "device": self.parts.device}
        like = torch.empty(0, self.draft_config.target_hidden_size, **options)
        self.make_graphs(like)

    def _draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        return self._draft_block(batch, shape)

    def _extend(
        self, forward_batch: ForwardBatch, hidden_states: torch.Tensor, next_token_ids: torch.Tensor
    ) -> None:
        """Rows of padding are stored too, behind the accepted ones. The next block overwrites them."""
        self._store(forward_batch, hidden_states)
