"""Drafting a whole block in one pass over the target's hidden states: DFlash.

Differs from reference: a draft is one CUDA graph, and so is the extension by what was accepted, for each of a
list of batch sizes (draft_graphs.py). Nothing of a request is kept but KV. So a round waits for no result,
and the next one can be launched before it ends. Assumes attention and tree ops that can be captured;
otherwise, and for larger batches, kernels are launched one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diptych.optimized.graphs.cuda_graph import CudaGraphs, graphs_of_drafter
from diptych.optimized.graphs.draft_graphs import DraftGraphs, capture_drafts
from diptych.shared.config.speculation_flags import possible_shapes
from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.speculation.drafter_base import BaseDFlashDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req


class DFlashDrafter(BaseDFlashDrafter):
    runs_ahead = True

    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.make_attention(self.draft_config.model, req_to_token_pool, num_slots)
        options: Any = {"dtype": self.parts.dtype, "device": self.parts.device}
        like = torch.empty(0, self.draft_config.target_hidden_size, **options)
        self.graphs = [
            DraftGraphs(self.config, shape, self.num_slots(shape), like, self.attention)
            for shape in possible_shapes(self.config)
        ]
        graphs = None if self.config.disable_cuda_graph else self._cuda_graphs()
        if graphs is not None:
            capture_drafts(self.graphs, graphs, self._draft_block, self._extend)

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        assert hidden_states is not None
        given = forward_batch, hidden_states, next_token_ids
        if not any(of_shape.extend(*given) for of_shape in self.graphs):
            self._extend(*given)

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        """Draft. With a graph, the next draft of the same size overwrites the tree."""
        for of_shape in self.graphs:
            tree = of_shape.draft(batch, shape)
            if tree is not None:
                return tree
        return self._draft_block(batch, shape)

    def _extend(
        self, forward_batch: ForwardBatch, hidden_states: torch.Tensor, next_token_ids: torch.Tensor
    ) -> None:
        """Rows of padding are stored too, behind the accepted ones. The next block overwrites them."""
        self._store(forward_batch, hidden_states)

    def _cuda_graphs(self) -> CudaGraphs | None:
        return graphs_of_drafter(self.parts.model, self.parts.device)
