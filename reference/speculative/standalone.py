"""Drafting with a smaller language model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from diptych.reference.speculative.draft_beams import BeamSteps
from diptych.shared.config import EngineConfig, read_config
from diptych.shared.interfaces import DrafterParts, ReqToTokenPool
from diptych.shared.interfaces import drafter as interface
from diptych.shared.loading.kv_sizing import kv_bytes_per_token
from diptych.shared.loading.load_model import load_model
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.modeling.kv_pool import attention_component, build_kv_pool
from diptych.shared.speculation.draft_model_base import check_draft_model_fits
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, ForwardMode, Req, TopTokens


class StandaloneDrafter(interface.Drafter):
    """Drafts with a language model that computes the target's tokens at the same positions, into the same
    slots of its own pool. It needs only the target's tokens."""

    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        assert config.speculative_draft_model is not None
        assert config.context_len is not None
        self.config = config
        self.parts = parts
        folder = resolve_model_path(config.speculative_draft_model, config.load_format)
        self.model_config = read_config(folder)
        check_draft_model_fits(self.model_config, config, parts.num_token_ids)
        self.model = load_model(folder, self.model_config, config, parts.component, parts.device, parts.dtype)
        self.num_kv_bytes_per_token = kv_bytes_per_token(self.model_config, parts.dtype)
        self.draft_tree = parts.component("draft_tree")()

    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.req_to_token_pool = req_to_token_pool
        component = self.parts.component
        kv_pool = build_kv_pool(
            component,
            self.model_config,
            num_slots,
            self.config.page_size,
            self.parts.dtype,
            self.parts.device,
        )
        attention = component(attention_component(self.model_config))(req_to_token_pool, kv_pool)
        self.model_runner = component("model_runner")(self.model, attention, kv_pool)

    def num_slots(self, shape: DraftShape) -> int:
        return 1 + (shape.num_steps - 1) * shape.top_k  # the newest token; no step follows the last beams

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
        assert self.config.context_len is not None
        top = self._top_tokens(self._root_step(batch), shape.top_k)
        steps = [self.draft_tree.first_beams(top)]
        beam_steps = BeamSteps(batch, 1, self.req_to_token_pool, self.config.context_len)
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
