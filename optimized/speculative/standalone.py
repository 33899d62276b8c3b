"""Drafting with a smaller language model of the same vocabulary.

Differs from reference: the next round can be launched before the result of this one is known, because a draft
reads tensors only, and lengths on the CPU are upper bounds. All steps of a draft are one CUDA graph, and so
is the extension by accepted tokens (draft_graphs.py), if attention and tree ops can be captured; otherwise
kernels are launched one by one. Loses the work of padding rows: an extension has as many rows as could be
accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from diptych.optimized.graphs.draft_graphs import GraphDrafter
from diptych.optimized.speculative.draft_beams import BeamSteps
from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.speculation.drafter_base import BaseStandaloneDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, ForwardMode, Req, TopTokens


class StandaloneDrafter(GraphDrafter, BaseStandaloneDrafter):
    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.make_attention(self.model_config, req_to_token_pool, num_slots)
        self.no_states = torch.empty(0, 1, dtype=self.parts.dtype, device=self.parts.device)
        self.make_graphs(self.no_states)

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        # Accepted drafts are computed again, because they may have moved to another slot, and a plain step or
        # a prefill has no drafts.
        states = self.no_states.new_zeros(forward_batch.num_tokens, 1)  # the graphs' buffers have a place
        super().extend(reqs, forward_batch, states, next_token_ids)

    # ---- captured functions ----

    @torch.inference_mode()
    def _extend(
        self, forward_batch: ForwardBatch, hidden_states: torch.Tensor, next_token_ids: torch.Tensor
    ) -> None:
        if forward_batch.num_kept is not None:
            # The mode tells attention that lengths on the CPU are upper bounds.
            forward_batch = replace(forward_batch, forward_mode=ForwardMode.TARGET_VERIFY)
        self._forward(forward_batch)

    # --8<-- [start:standalone-draft]
    @torch.inference_mode()
    def _draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        top = self._top_tokens(self._root_step(batch), shape.top_k)
        steps = [self.draft_tree.first_beams(top)]
        beam_steps = BeamSteps(batch, 1, self.req_to_token_pool, self.context_len)
        for _ in range(shape.num_steps - 1):
            top = self._top_tokens(beam_steps.next(steps[-1]), shape.top_k)
            by_beam = TopTokens(*(values.view(len(batch.root_ids), shape.top_k, -1) for values in top))
            steps.append(self.draft_tree.next_beams(steps[-1], by_beam))
        return self.draft_tree.build(batch.root_ids, steps, shape.num_draft_tokens)

    # --8<-- [end:standalone-draft]

    def _top_tokens(self, forward_batch: ForwardBatch, k: int) -> TopTokens:
        logits = self.model.compute_logits(self._forward(forward_batch))
        top: TopTokens = self.draft_tree.top_tokens(logits[:, : self.parts.num_token_ids], k)
        return top

    def _forward(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """Hidden states of all tokens."""
        plan = self.attention.plan(forward_batch)
        attention = BatchAttention(self.attention, plan, self.kv_pool, forward_batch.out_cache_loc)
        states: torch.Tensor = self.model(forward_batch.input_ids, forward_batch.positions, attention)
        return states

    def _root_step(self, batch: DraftBatch) -> ForwardBatch:
        """The step of the newest tokens, whose KV the target has not computed either."""
        bs = len(batch.root_ids)
        ones = torch.ones_like(batch.seq_lens)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=batch.root_ids,
            positions=batch.seq_lens.clamp(max=self.context_len - 1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens + 1,
            out_cache_loc=batch.slots[:, 0].contiguous(),
            extend_seq_lens=ones,
            extend_start_loc=torch.arange(bs, device=ones.device),
            seq_lens_cpu=tuple(n + 1 for n in batch.seq_lens_cpu),
            extend_seq_lens_cpu=(1,) * bs,
        )
