"""Drafting with a small network over the target's hidden states: EAGLE, EAGLE-3 and NEXTN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from diptych.reference.speculative.draft_beams import BeamSteps
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import DrafterParts, DraftOutput, ReqToTokenPool
from diptych.shared.interfaces import drafter as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.loading.kv_sizing import kv_bytes_per_token
from diptych.shared.loading.load_model import load_draft_model
from diptych.shared.modeling.kv_pool import attention_component, build_kv_pool
from diptych.shared.speculation.draft_model_base import padding_token_ids
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req, TopTokens


class LastRow(NamedTuple):
    """The draft model's results for the newest KV of a request, from which drafting starts."""

    hidden_states: torch.Tensor  # [hidden_size], for logits
    next_hidden_states: torch.Tensor  # [hidden_size], for the token that comes next


class EagleDrafter(interface.Drafter):
    """Drafts with a model whose input is a token and the target's hidden state of the previous token. So slot
    j of its pool holds token j + 1 and hidden state j, at position j. When the target has KV for n tokens,
    the draft model has KV for n tokens too and has processed the newest token. KV of drafts, computed from
    its own hidden states, follows. `extend` recomputes the accepted part from the target's hidden states."""

    is_bigram = True

    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        assert config.context_len is not None
        self.config = config
        self.parts = parts
        self.draft_config, self.model = load_draft_model(config, parts)
        self.hidden_layers = self.draft_config.target_layers
        self.num_kv_bytes_per_token = kv_bytes_per_token(self.draft_config.model, parts.dtype)
        self.draft_tree = parts.component("draft_tree")()
        self.is_no_token = padding_token_ids(config, parts, self.draft_config, self.model)
        self.last_rows: dict[str, LastRow] = {}  # by rid

    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        model_config, component = self.draft_config.model, self.parts.component
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = build_kv_pool(
            component, model_config, num_slots, self.config.page_size, self.parts.dtype, self.parts.device
        )
        self.attention = component(attention_component(model_config))(req_to_token_pool, self.kv_pool)

    def num_slots(self, shape: DraftShape) -> int:
        return (shape.num_steps - 1) * shape.top_k  # no step is needed for the last beams

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
        beam_steps = BeamSteps(batch, 0, self.req_to_token_pool, self._context_len)
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

    def forget(self, req: Req) -> None:
        self.last_rows.pop(req.rid, None)

    @torch.inference_mode()
    def _forward(
        self, forward_batch: ForwardBatch, input_ids: torch.Tensor, hidden_states: torch.Tensor
    ) -> DraftOutput:
        plan = self.attention.plan(forward_batch)
        attention = BatchAttention(self.attention, plan, self.kv_pool, forward_batch.out_cache_loc)
        output: DraftOutput = self.model(input_ids, forward_batch.positions, hidden_states, attention)
        return output

    @torch.inference_mode()
    def _top_tokens(self, hidden_states: torch.Tensor, k: int) -> TopTokens:
        logits = self.model.compute_logits(hidden_states)
        if self.is_no_token is not None:
            logits = logits.masked_fill(self.is_no_token, -torch.inf)
        top: TopTokens = self.draft_tree.top_tokens(logits, k)
        return TopTokens(top.probs, self.model.to_target_ids(top.token_ids))

    @property
    def _context_len(self) -> int:
        assert self.config.context_len is not None
        return self.config.context_len
