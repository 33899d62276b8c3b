"""Drafting with a small network over the target's hidden states: EAGLE, EAGLE-3 and NEXTN.

Differs from reference: all steps of a draft, from the first beams to the tree, are one CUDA graph, and so is
the extension by what was accepted, for each of a list of batch sizes (draft_graphs.py). The model's results
for a request's newest KV are in tensors, by the request's row. So a round waits for no result, and the next
one can be launched before it ends. Assumes attention and tree ops that can be captured; otherwise, and for
larger batches, kernels are launched one by one. Loses the memory of two hidden states for each request that
may run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from diptych.optimized.graphs.draft_graphs import GraphDrafter
from diptych.optimized.speculative.draft_beams import BeamSteps
from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.speculation.drafter_base import BaseEagleDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, ForwardMode, Req, TopTokens


class LastRow(NamedTuple):
    """The draft model's results for the newest KV of each request, by its row, from which drafting starts."""

    hidden_states: torch.Tensor  # [rows of req_to_token, hidden_size], for logits
    next_hidden_states: torch.Tensor  # [rows of req_to_token, hidden_size], for the token that comes next


class EagleDrafter(GraphDrafter, BaseEagleDrafter):
    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.make_attention(self.draft_config.model, req_to_token_pool, num_slots)
        options: Any = {"dtype": self.parts.dtype, "device": self.parts.device}
        num_rows = req_to_token_pool.req_to_token.shape[0]
        self.last_rows = LastRow(*torch.zeros(2, num_rows, self.draft_config.model.hidden_size, **options))
        like = torch.empty(0, self.draft_config.target_hidden_size, **options)
        self.make_graphs(like)

    def last_row(self, req: Req) -> LastRow:
        return LastRow(*(rows[req.req_pool_idx] for rows in self.last_rows))

    def set_last_row(self, req: Req, rows: torch.Tensor) -> None:
        for kept, row in zip(self.last_rows, rows):
            kept[req.req_pool_idx] = row

    def forget(self, req: Req) -> None:
        """Nothing to free: a row is overwritten by its next owner."""

    # ---- captured functions ----

    @torch.inference_mode()
    def _extend(
        self, forward_batch: ForwardBatch, hidden_states: torch.Tensor, next_token_ids: torch.Tensor
    ) -> None:
        # --8<-- [start:eagle-extend]
        last, rows = forward_batch.last_token_rows, forward_batch.req_pool_indices
        input_ids = forward_batch.input_ids.roll(-1)  # each request's tokens, one later
        input_ids[last] = next_token_ids
        if forward_batch.num_kept is not None:
            # The mode tells attention that every request has the same small number of rows.
            forward_batch = replace(forward_batch, forward_mode=ForwardMode.TARGET_VERIFY)
        output = self._forward(forward_batch, input_ids, hidden_states)
        self.last_rows.hidden_states[rows] = output.hidden_states[last]
        self.last_rows.next_hidden_states[rows] = output.next_hidden_states[last]
        # --8<-- [end:eagle-extend]

    @torch.inference_mode()
    def _draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        # --8<-- [start:eagle-draft]
        bs, k = len(batch.root_ids), shape.top_k
        top = self._top_tokens(self.last_rows.hidden_states[batch.req_pool_indices], k)
        steps = [self.draft_tree.first_beams(top)]
        hidden_states = self.last_rows.next_hidden_states[batch.req_pool_indices].repeat_interleave(k, 0)
        beam_steps = BeamSteps(batch, 0, self.req_to_token_pool, self.context_len)
        first_beams = torch.arange(bs, device=batch.root_ids.device)[:, None] * k
        for _ in range(shape.num_steps - 1):
            forward_batch = beam_steps.next(steps[-1])
            output = self._forward(forward_batch, forward_batch.input_ids, hidden_states)
            top = self._top_tokens(output.hidden_states, k)
            by_beam = TopTokens(*(values.view(bs, k, k) for values in top))
            steps.append(self.draft_tree.next_beams(steps[-1], by_beam))
            hidden_states = output.next_hidden_states[(first_beams + steps[-1].parents).flatten()]
        return self.draft_tree.build(batch.root_ids, steps, shape.num_draft_tokens)
        # --8<-- [end:eagle-draft]
