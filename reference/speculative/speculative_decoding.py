"""Speculation as a decode strategy: a round if there is memory for drafts, otherwise a plain step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.reference.decoding import PlainDecoding
from diptych.reference.speculative.chain import ChainRound
from diptych.reference.speculative.tree import TreeRound
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import SchedulerFeature, SchedulerParts
from diptych.shared.loading.kv_sizing import num_speculative_slots
from diptych.shared.scheduling.pages import evict_for, round_up_to_page, rows_of
from diptych.shared.speculation.adaptive_shape import Acceptance
from diptych.shared.speculation.computed_prompt import computed_chunks, learn_prompt
from diptych.shared.types import BatchResult, DraftBatch, ForwardMode, Req, ScheduleBatch, SpeculationStats


class SpeculativeDecoding(PlainDecoding, SchedulerFeature):
    """Between steps a request owns no slot beyond its committed ones (to the end of a page). During a round
    it owns `num_slots` more, first for the drafter, then for the KV of the nodes. Slots of rejected nodes are
    freed before the round ends."""

    def __init__(self, config: EngineConfig, context_len: int, parts: SchedulerParts) -> None:
        super().__init__(parts)
        assert parts.drafter is not None
        self.drafter = parts.drafter
        self.acceptance = Acceptance(config)
        self.num_slots = num_speculative_slots(config, self.drafter)
        is_chain = self.acceptance.largest.top_k == 1
        self.round = (ChainRound if is_chain else TreeRound)(context_len, parts)

    def num_reserved(self, running: Sequence[Req]) -> int:
        return self.num_slots * len(running)  # so that they can go on speculating

    def prepare(self, reqs: list[Req], most_steps: int | None = None) -> ScheduleBatch | None:
        """Prepare a round, or a plain step if there is no room for drafts, which cause no retraction."""
        return self._prepare_round(reqs) if self.can_speculate(reqs) else super().prepare(reqs)

    def can_speculate(self, reqs: Sequence[Req]) -> bool:
        """Whether there are slots for every request's drafts, and a request that may still produce two
        tokens."""
        if all(req.max_new_tokens - len(req.output_ids) <= 1 for req in reqs):
            return False
        tree_cache, allocator = self.parts.tree_cache, self.parts.allocator
        page_size = allocator.page_size
        num_tokens = sum(
            round_up_to_page(req.kv_committed_len + self.num_slots, page_size)
            - round_up_to_page(req.kv_committed_len, page_size)
            for req in reqs
        )
        # Do not evict cached prefixes if eviction cannot suffice.
        if num_tokens > allocator.available_size() + tree_cache.evictable_size():
            return False
        return evict_for(num_tokens, tree_cache, allocator)

    def _prepare_round(self, reqs: list[Req]) -> ScheduleBatch:
        """Allocate slots behind each request's committed ones."""
        pool = self.parts.req_to_token_pool
        starts = [req.kv_committed_len for req in reqs]
        rows = rows_of(reqs)
        last_locs = pool.read_each(rows, [start - 1 for start in starts])
        slots = self.parts.allocator.alloc_extend(starts, [n + self.num_slots for n in starts], last_locs)
        assert slots is not None, "no slots for drafts: the caller checks this"
        pool.write_ragged(rows, starts, [self.num_slots] * len(reqs), slots)
        for req in reqs:
            req.kv_allocated_len = req.kv_committed_len + self.num_slots
        return ScheduleBatch(list(reqs), ForwardMode.TARGET_VERIFY, out_cache_loc=slots)

    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> BatchResult:
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            result, depths = self.round.run(self._draft_batch(batch), self.acceptance.shape)
            for req, depth, token_ids in zip(batch.reqs, depths, result.token_ids):
                self.acceptance.record(req, depth, len(token_ids))
            return result
        result = super().run(batch, chunked_req)
        self._extend(batch.reqs, result, chunked_req)
        return result

    def _draft_batch(self, batch: ScheduleBatch) -> DraftBatch:
        reqs, device = batch.reqs, self.parts.allocator.device
        assert batch.out_cache_loc is not None
        seq_lens_cpu = [req.kv_committed_len for req in reqs]
        newest = [req.output_ids[-1] for req in reqs]
        root_ids, rows, seq_lens = (
            torch.tensor(numbers, device=device) for numbers in (newest, rows_of(reqs), seq_lens_cpu)
        )
        slots = batch.out_cache_loc.to(device).view(len(reqs), self.num_slots)
        return DraftBatch(list(reqs), root_ids, rows, seq_lens, tuple(seq_lens_cpu), slots)

    def _extend(self, reqs: Sequence[Req], result: BatchResult, chunked_req: Req | None) -> None:
        """Call the drafter's `extend` for KV that stays, after a prefill or a decode step."""
        next_token_ids = [max(token_ids[-1], 0) for token_ids in result.token_ids]  # NaN: its request ends
        if chunked_req is not None and chunked_req in reqs:  # the sampled token has no meaning
            next_token_ids[reqs.index(chunked_req)] = chunked_req.all_ids[len(chunked_req.fill_ids)]
        ids = torch.tensor(next_token_ids, device=self.parts.allocator.device)
        assert result.forward_batch is not None
        assert result.logits_output is not None
        self.drafter.extend(reqs, result.forward_batch, result.logits_output.hidden_states, ids)

    def has_come(self, req: Req, first_token: int, draft_state: bytes) -> None:
        if self.drafter.kv_pool is not None:
            self.drafter.restore(req, draft_state)
        else:
            learn_prompt(req, first_token, computed_chunks(req, self.parts), self.drafter)

    def has_left(self, req: Req) -> None:
        self.drafter.forget(req)

    def stats(self, num_accepted_tokens: int) -> SpeculationStats:
        return self.acceptance.stats(num_accepted_tokens)
