"""Drafting steps of a draft model: K concurrent beams per request, each of which sees only its ancestors."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.types import Beams, DraftBatch, ForwardBatch, ForwardMode


class BeamSteps:
    """Makes the ForwardBatches of successive drafting steps.

    A request's drafts are in its row behind its seq_len tokens with KV: first `num_before` tokens that the
    drafter has already computed (1, the newest token, for a language model; otherwise 0), then the K beams of
    each step. So slots are in the order of steps and are not positions: all beams of a step have the same
    position.
    """

    def __init__(
        self, batch: DraftBatch, num_before: int, req_to_token_pool: ReqToTokenPool, context_len: int
    ) -> None:
        self.batch = batch
        self.req_to_token_pool = req_to_token_pool
        self.context_len = context_len
        self.num_visible = num_before  # behind seq_len, visible to every beam
        self.num_steps = 0
        # [bs, K, K * num_steps]: which earlier beams, and itself, each beam of the last step sees
        self.visible = torch.empty(batch.batch_size, 0, 0, dtype=torch.bool, device=batch.seq_lens.device)

    def next(self, beams: Beams) -> ForwardBatch:
        """The step that computes `beams`, the latest ones. Its tokens are request by request, K each."""
        bs, k = beams.token_ids.shape
        device = beams.token_ids.device
        starts = self.batch.seq_lens + self.num_visible + self.num_steps * k
        positions = self.batch.seq_lens + self.num_visible + self.num_steps
        own = torch.eye(k, dtype=torch.bool, device=device).expand(bs, k, k)
        if self.num_steps > 0:
            parents = beams.parents[:, :, None].expand(-1, -1, self.visible.shape[2])
            own = torch.cat([self.visible.gather(1, parents), own], dim=2)
        self.visible = own
        self.num_steps += 1
        columns = starts[:, None] + torch.arange(k, device=device)
        slots = self.req_to_token_pool.req_to_token[self.batch.req_pool_indices[:, None], columns]
        seq_lens_cpu = tuple(n + self.num_visible + self.num_steps * k for n in self.batch.seq_lens_cpu)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=beams.token_ids.flatten(),
            # Drafts beyond the context's end are never kept.
            positions=positions.clamp(max=self.context_len - 1).repeat_interleave(k),
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=starts + k,
            out_cache_loc=slots.flatten().to(torch.int64),
            extend_seq_lens=torch.full_like(starts, k),
            extend_start_loc=torch.arange(bs, device=device) * k,
            seq_lens_cpu=seq_lens_cpu,
            extend_seq_lens_cpu=(k,) * bs,
            tree_mask=own if k > 1 else None,  # a chain needs only causal attention
        )
