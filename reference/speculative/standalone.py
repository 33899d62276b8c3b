"""Drafting with a smaller language model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from diptych.reference.speculative.draft_beams import BeamSteps
from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.speculation.drafter_base import BaseStandaloneDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, ForwardMode, Req, TopTokens


class StandaloneDrafter(BaseStandaloneDrafter):
    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.make_attention(self.model_config, req_to_token_pool, num_slots)
        self.model_runner = self.parts.component("model_runner")(self.model, self.attention, self.kv_pool)

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        # Accepted drafts are computed again, because they may have moved to another slot, and a plain step or
        # a prefill has no drafts.
        self.model_runner.forward(replace(forward_batch, input_logprob_rows=None, input_logprob_ids=None))

    # --8<-- [start:standalone-draft]
    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        top = self._top_tokens(self._root_step(batch), shape.top_k)
        steps = [self.draft_tree.first_beams(top)]
        beam_steps = BeamSteps(batch, 1, self.req_to_token_pool, self.context_len)
        for _ in range(shape.num_steps - 1):
            top = self._top_tokens(beam_steps.next(steps[-1]), shape.top_k)
            by_beam = TopTokens(*(values.view(batch.batch_size, shape.top_k, -1) for values in top))
            steps.append(self.draft_tree.next_beams(steps[-1], by_beam))
        return self.draft_tree.build(batch.root_ids, steps, shape.num_draft_tokens)

    # --8<-- [end:standalone-draft]

    def _top_tokens(self, forward_batch: ForwardBatch, k: int) -> TopTokens:
        logits = self.model_runner.forward(forward_batch).next_token_logits
        top: TopTokens = self.draft_tree.top_tokens(logits[:, : self.parts.num_token_ids], k)
        return top

    def _root_step(self, batch: DraftBatch) -> ForwardBatch:
        """The step of the newest tokens, whose KV the target has not computed either."""
        bs = batch.batch_size
        rows = batch.req_pool_indices
        ones = torch.ones_like(batch.seq_lens)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=batch.root_ids,
            positions=batch.seq_lens,
            req_pool_indices=rows,
            seq_lens=batch.seq_lens + 1,
            out_cache_loc=self.req_to_token_pool.req_to_token[rows, batch.seq_lens].to(torch.int64),
            extend_seq_lens=ones,
            extend_start_loc=torch.arange(bs, device=ones.device),
            seq_lens_cpu=tuple(n + 1 for n in batch.seq_lens_cpu),
            extend_seq_lens_cpu=(1,) * bs,
        )
