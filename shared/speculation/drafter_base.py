"""What the drafters of both panels have in common: model, memory and attention, and single passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from diptych.shared.config import EngineConfig, ModelConfig, read_config
from diptych.shared.interfaces import Drafter, DrafterParts, DraftOutput, ReqToTokenPool
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.loading.kv_sizing import kv_bytes_per_token
from diptych.shared.loading.load_model import load_draft_model, load_model
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.modeling.kv_pool import attention_component, build_kv_pool
from diptych.shared.speculation.draft_model_base import check_draft_model_fits, padding_token_ids
from diptych.shared.types import (
    DraftBatch,
    DraftShape,
    DraftTree,
    ForwardBatch,
    ForwardMode,
    Req,
    TopTokens,
)


class BaseDrafter(Drafter):
    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        assert config.context_len is not None
        self.config = config
        self.context_len = config.context_len
        self.parts = parts

    def make_attention(
        self, model_config: ModelConfig, req_to_token_pool: ReqToTokenPool, num_slots: int
    ) -> None:
        """The drafter's own KV pool, and attention over it."""
        component, dtype, device = self.parts.component, self.parts.dtype, self.parts.device
        self.req_to_token_pool = req_to_token_pool
        self.attention_config = model_config
        self.kv_pool = build_kv_pool(component, model_config, num_slots, self.config.page_size, dtype, device)
        self.attention = component(attention_component(model_config))(req_to_token_pool, self.kv_pool)


class BaseHeadDrafter(BaseDrafter):
    """Drafts with a model that reads the target's hidden states."""

    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        super().__init__(config, parts)
        self.draft_config, model = load_draft_model(config, parts)
        self.model: Any = model
        self.hidden_layers = self.draft_config.target_layers
        self.num_kv_bytes_per_token = kv_bytes_per_token(self.draft_config.model, parts.dtype)
        self.draft_tree = parts.component("draft_tree")()
        self.is_no_token = padding_token_ids(config, parts, self.draft_config, model)

    @torch.inference_mode()
    def _top_tokens(self, hidden_states: torch.Tensor, k: int) -> TopTokens:
        logits = self.model.compute_logits(hidden_states)
        if self.is_no_token is not None:
            logits = logits.masked_fill(self.is_no_token, -torch.inf)
        top: TopTokens = self.draft_tree.top_tokens(logits, k)
        return TopTokens(top.probs, self.model.to_target_ids(top.token_ids))


class BaseEagleDrafter(BaseHeadDrafter):
    """Drafts with a model whose input is a token and the target's hidden state of the previous token. So slot
    j of its pool holds token j + 1 and hidden state j, at position j. When the target has KV for n tokens,
    the draft model has KV for n tokens too and has processed the newest token. KV of drafts, computed from
    its own hidden states, follows. `extend` recomputes the accepted part from the target's hidden states."""

    is_bigram = True

    def num_slots(self, shape: DraftShape) -> int:
        return (shape.num_steps - 1) * shape.top_k  # no step is needed for the last beams

    # --8<-- [start:state-of-a-request]
    def state_of(self, req: Req) -> bytes:
        """The head's results for the newest KV of a request, from which drafting starts."""
        rows = torch.stack([*self.last_row(req)]).cpu()  # [2, hidden_size]
        return bytes(rows.view(torch.uint8).flatten().numpy())

    def restore(self, req: Req, state: bytes) -> None:
        rows = torch.frombuffer(bytearray(state), dtype=self.parts.dtype).view(2, -1)
        self.set_last_row(req, rows.to(self.parts.device))

    # --8<-- [end:state-of-a-request]

    @abstractmethod
    def last_row(self, req: Req) -> Iterable[torch.Tensor]:
        """The two hidden states of a request."""

    @abstractmethod
    def set_last_row(self, req: Req, rows: torch.Tensor) -> None:
        """Put them back. rows: [2, hidden_size]."""

    @torch.inference_mode()
    def _forward(
        self, forward_batch: ForwardBatch, input_ids: torch.Tensor, hidden_states: torch.Tensor
    ) -> DraftOutput:
        plan = self.attention.plan(forward_batch)
        attention = BatchAttention(self.attention, plan, self.kv_pool, forward_batch.out_cache_loc)
        output: DraftOutput = self.model(input_ids, forward_batch.positions, hidden_states, attention)
        return output


class BaseDFlashDrafter(BaseHeadDrafter):
    """Drafts with a model that fills in a block behind the target's hidden states. Slot j of its pool holds
    K and V of the target's hidden state j, at position j. When the target has KV for n tokens, the draft
    model has KV for n tokens too. A draft writes KV of the newest token, at position n, and of masks behind
    it. `extend` overwrites it with KV of what the target computed."""

    def num_slots(self, shape: DraftShape) -> int:
        return shape.num_draft_tokens

    @torch.inference_mode()
    def _store(self, forward_batch: ForwardBatch, hidden_states: torch.Tensor) -> None:
        attention = BatchAttention(self.attention, None, self.kv_pool, forward_batch.out_cache_loc)
        self.model.store_features(hidden_states, forward_batch.positions, attention)

    # --8<-- [start:block-of-masks]
    def block_batch(self, batch: DraftBatch, shape: DraftShape) -> ForwardBatch:
        """Each request's newest token and masks behind it, without causality."""
        bs, n = len(batch.root_ids), shape.num_draft_tokens
        device = batch.root_ids.device
        assert self.draft_config.block is not None
        input_ids = torch.full((bs, n), self.draft_config.block.mask_id, device=device)
        input_ids[:, 0] = batch.root_ids
        positions = batch.seq_lens[:, None] + torch.arange(n, device=device)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=input_ids.flatten(),
            positions=positions.clamp(max=self.context_len - 1).flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens + n,
            out_cache_loc=batch.slots[:, :n].flatten(),
            extend_seq_lens=torch.full_like(batch.seq_lens, n),
            extend_start_loc=torch.arange(bs, device=device) * n,
            seq_lens_cpu=tuple(seq_len + n for seq_len in batch.seq_lens_cpu),
            extend_seq_lens_cpu=(n,) * bs,
            tree_mask=torch.ones(bs, n, n, dtype=torch.bool, device=device),
        )

    # --8<-- [end:block-of-masks]

    # --8<-- [start:draft-a-block]
    @torch.inference_mode()
    def _draft_block(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        """A chain, from one pass of the draft model."""
        bs, n = len(batch.root_ids), shape.num_draft_tokens
        forward_batch = self.block_batch(batch, shape)
        plan = self.attention.plan(forward_batch)
        attention = BatchAttention(self.attention, plan, self.kv_pool, forward_batch.out_cache_loc)
        hidden_states = self.model(forward_batch.input_ids, forward_batch.positions, attention)
        at_masks = hidden_states.view(bs, n, -1)[:, 1:].flatten(0, 1)
        drafts = self._top_tokens(at_masks, 1).token_ids.view(bs, n - 1)
        token_ids = torch.cat((batch.root_ids[:, None], drafts), dim=1)
        parents = torch.arange(-1, n - 1, device=token_ids.device).expand(bs, n).contiguous()
        tree: DraftTree = self.draft_tree.from_parents(token_ids, parents, forward_batch.extend_seq_lens)
        return tree

    # --8<-- [end:draft-a-block]


class BaseStandaloneDrafter(BaseDrafter):
    """Drafts with a language model that computes the target's tokens at the same positions, into the same
    slots of its own pool. It needs only the target's tokens."""

    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        super().__init__(config, parts)
        assert config.speculative_draft_model is not None
        folder = resolve_model_path(config.speculative_draft_model, config.load_format)
        self.model_config = read_config(folder)
        check_draft_model_fits(self.model_config, config, parts.num_token_ids)
        self.model = load_model(folder, self.model_config, config, parts.component, parts.device, parts.dtype)
        self.num_kv_bytes_per_token = kv_bytes_per_token(self.model_config, parts.dtype)
        self.draft_tree = parts.component("draft_tree")()

    def num_slots(self, shape: DraftShape) -> int:
        return 1 + (shape.num_steps - 1) * shape.top_k  # the newest token; no step follows the last beams
