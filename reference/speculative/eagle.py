"""Drafting with a small network over the target's hidden states: EAGLE, EAGLE-3 and NEXTN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from diptych.reference.speculative.draft_beams import BeamSteps
from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.speculation.drafter_base import BaseEagleDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req, TopTokens


class LastRow(NamedTuple):
    """The draft model's results for the newest KV of a request, from which drafting starts."""

    hidden_states: torch.Tensor  # [hidden_size], for logits
    next_hidden_states: torch.Tensor  # [hidden_size], for the token that comes next


class EagleDrafter(BaseEagleDrafter):
    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.make_attention(self.draft_config.model, req_to_token_pool, num_slots)
        self.last_rows: dict[str, LastRow] = {}  # by rid

    # --8<-- [start:eagle-extend]
    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        assert hidden_states is not None
        last = forward_batch.last_token_rows
        input_ids = forward_batch.input_ids.roll(-1)  # each request's tokens, one later
        input_ids[last] = next_token_ids
        output = self._forward(forward_batch, input_ids, hidden_states)
        rows = zip(output.hidden_states[last], output.next_hidden_states[last])
        self.last_rows |= {req.rid: LastRow(*row) for req, row in zip(reqs, rows)}

    # --8<-- [end:eagle-extend]

    # --8<-- [start:eagle-draft]
    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        bs, k = batch.batch_size, shape.top_k
        last_rows = [self.last_rows[req.rid] for req in batch.reqs]
        top = self._top_tokens(torch.stack([row.hidden_states for row in last_rows]), k)
        hidden_states = torch.stack([row.next_hidden_states for row in last_rows]).repeat_interleave(k, 0)
        steps = [self.draft_tree.first_beams(top)]
        beam_steps = BeamSteps(batch, 0, self.req_to_token_pool, self.context_len)
        for _ in range(shape.num_steps - 1):
            forward_batch = beam_steps.next(steps[-1])
            output = self._forward(forward_batch, forward_batch.input_ids, hidden_states)
            top = self._top_tokens(output.hidden_states, k)
            by_beam = TopTokens(*(values.view(bs, k, k) for values in top))
            steps.append(self.draft_tree.next_beams(steps[-1], by_beam))
            parents = torch.arange(bs, device=top.token_ids.device)[:, None] * k + steps[-1].parents
            hidden_states = output.next_hidden_states[parents.flatten()]
        return self.draft_tree.build(batch.root_ids, steps, shape.num_draft_tokens)

    # --8<-- [end:eagle-draft]

    def last_row(self, req: Req) -> LastRow:
        return self.last_rows[req.rid]

    def set_last_row(self, req: Req, rows: torch.Tensor) -> None:
        self.last_rows[req.rid] = LastRow(*rows)

    def forget(self, req: Req) -> None:
        self.last_rows.pop(req.rid, None)
