"""Makes every rank use the tokens of rank 0.

All ranks compute the same logits and sample from them, so they agree without these broadcasts. But a rank
whose logits differ in the last bit can sample another token at a tie. Then its next batch differs, and
collectives do not match. Tokens enter the engine in two places: the sampler's ids and the drafter's trees.
Accepted drafts, grammar masks and ends of requests follow from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from diptych.shared.interfaces import Collectives, Drafter, ReqToTokenPool, Sampler
from diptych.shared.types import (
    DraftBatch,
    DraftShape,
    DraftTree,
    ForwardBatch,
    Req,
    SampleOutput,
    SamplingBatchInfo,
)


class AgreedSampler(Sampler):
    """Samples on each rank, and takes the token ids of rank 0."""

    def __init__(self, sampler: Sampler, tp: Collectives) -> None:
        self.sampler = sampler
        self.tp = tp

    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        # --8<-- [start:agree-on-tokens]
        output = self.sampler.sample(logits, info, positions)
        return output._replace(next_token_ids=self.tp.broadcast(output.next_token_ids))
        # --8<-- [end:agree-on-tokens]


class AgreedDrafter(Drafter):
    """Drafts on each rank, and takes the trees of rank 0. Each rank has the whole draft model, which is
    small: if it were divided, every layer of every draft step would need two sums over ranks."""

    def __init__(self, drafter: Drafter, tp: Collectives) -> None:
        self.drafter = drafter
        self.tp = tp
        self.hidden_layers = drafter.hidden_layers
        self.is_bigram = drafter.is_bigram
        self.runs_ahead = drafter.runs_ahead
        self.num_kv_bytes_per_token = drafter.num_kv_bytes_per_token

    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.drafter.allocate(req_to_token_pool, num_slots)
        self.kv_pool = self.drafter.kv_pool

    def num_slots(self, shape: DraftShape) -> int:
        return self.drafter.num_slots(shape)

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        self.drafter.extend(reqs, forward_batch, hidden_states, next_token_ids)

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        tree = self.drafter.draft(batch, shape)
        tensors = [getattr(tree, field.name) for field in fields(tree)]
        rows = torch.cat([x.flatten(1) if x.dim() > 1 else x[:, None] for x in tensors], dim=1)
        parts = self.tp.broadcast(rows).split([x[0].numel() for x in tensors], dim=1)
        return DraftTree(*(part.reshape(x.shape).to(x.dtype) for part, x in zip(parts, tensors)))

    def state_of(self, req: Req) -> bytes:
        return self.drafter.state_of(req)

    def restore(self, req: Req, state: bytes) -> None:
        self.drafter.restore(req, state)

    def forget(self, req: Req) -> None:
        self.drafter.forget(req)
