"""Admission of waiting requests to a prefill step: explicit budgets, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.shared.interfaces import (
    CLIP_MAX_NEW_TOKENS,
    MAX_WAITS,
    AddReqResult,
    PrefillBudget,
    PrefixCache,
    RadixKey,
    TokenToKVPoolAllocator,
)
from diptych.shared.interfaces import prefill_adder as interface
from diptych.shared.scheduling.admission import fewest_victims, prefix_key
from diptych.shared.scheduling.pages import round_down_to_page, round_up_to_page
from diptych.shared.types import Req


class PrefillAdder(interface.PrefillAdder):
    def __init__(
        self,
        budget: PrefillBudget,
        tree_cache: PrefixCache,
        allocator: TokenToKVPoolAllocator,
        running: Sequence[Req],
    ) -> None:
        self.page_size = budget.page_size
        self.new_token_ratio = budget.new_token_ratio
        self.tree_cache = tree_cache
        self.allocator = allocator
        self.running = list(running)
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None
        self.num_waits = 0
        threshold = None if tree_cache.disable else budget.in_batch_prefix_threshold
        self.min_shared_len = (
            None if threshold is None else round_up_to_page(max(threshold, 1), self.page_size)
        )

        # --8<-- [start:prefill-budgets]
        num_mixed = budget.num_mixed_decode_tokens
        self.reserved_tokens = num_mixed + budget.num_reserved_tokens
        self.reserved_tokens += sum(self._reservation(req) for req in running)
        self.rem_input_tokens = budget.max_prefill_tokens - num_mixed
        self.rem_chunk_tokens = (
            None if budget.chunked_prefill_size is None else budget.chunked_prefill_size - num_mixed
        )
        # --8<-- [end:prefill-budgets]

    @property
    def rem_total_tokens(self) -> int:  # type: ignore[override]
        """Free tokens, computed at each call because a locked prefix is not evictable."""
        return self._num_free() - self.reserved_tokens

    def add_chunked_req(self, req: Req) -> Req | None:
        prefix_len = len(req.prefix_indices)
        remaining = req.num_tokens - prefix_len
        # Reservations of other requests do not count: a started prompt continues in whatever memory is free.
        num_free = self._num_free()
        limit = num_free if self.rem_chunk_tokens is None else min(num_free, self.rem_chunk_tokens)
        extend_len = self._truncate(remaining, limit)
        if extend_len == 0:
            return req
        self._add(req, extend_len)
        return req if extend_len < remaining else None

    # --8<-- [start:add-one-req]
    def add_one_req(self, req: Req) -> AddReqResult:
        key = prefix_key(req, self.tree_cache.is_bigram)
        match = self.tree_cache.match_prefix(key)
        matched_len = len(match.device_indices)
        if self._is_computed_now(key, matched_len):
            self.num_waits += 1
            return AddReqResult.WAIT if self.num_waits <= MAX_WAITS else AddReqResult.OTHER
        remaining = req.num_tokens - matched_len
        if not self._fits(req, remaining):
            return AddReqResult.NO_TOKEN
        is_full = round_up_to_page(remaining, self.page_size) >= self.rem_input_tokens
        if is_full and self.can_run_list:
            return AddReqResult.OTHER
        extend_len = self._truncate(remaining, self.rem_chunk_tokens)
        if extend_len == 0:
            return AddReqResult.OTHER

        self.tree_cache.inc_lock_ref(match.last_node)
        if not self._fits(req, remaining):
            self.tree_cache.dec_lock_ref(match.last_node)
            return AddReqResult.NO_TOKEN
        req.last_node = match.last_node
        req.prefix_indices = match.device_indices
        req.cache_protected_len = matched_len
        self._add(req, extend_len)
        # --8<-- [end:add-one-req]
        if extend_len < remaining:
            self.new_chunked_req = req
        return AddReqResult.CONTINUE

    def preempt_to_schedule(self, req: Req, min_priority_gap: int) -> list[Req]:
        num_needed = round_up_to_page(req.num_tokens, self.page_size) + _clipped_max_new(req) + 1
        less_important = [r for r in self.running if req.priority - r.priority > min_priority_gap]
        victims = fewest_victims(less_important, num_needed - self.rem_total_tokens, self._reservation)
        self.running = [r for r in self.running if r not in victims]
        self.reserved_tokens -= sum(self._reservation(victim) for victim in victims)
        return victims

    def _num_free(self) -> int:
        """Tokens that are free, or become free by eviction."""
        return self.allocator.available_size() + self.tree_cache.evictable_size()

    def _is_computed_now(self, key: RadixKey, matched_len: int) -> bool:
        """Whether an added request computes a prefix of `key` that is long enough to wait for."""
        if self.min_shared_len is None:
            return False
        end = matched_len + self.min_shared_len + key.is_bigram
        shared_prefix = key.token_ids[:end]
        return len(shared_prefix) == end and any(
            len(other.prefix_indices) == matched_len
            and other.extra_key == key.extra_key
            and other.key_ids[: len(other.fill_ids)][:end] == shared_prefix
            for other in self.can_run_list
        )

    def _reservation(self, req: Req) -> int:
        return int(_clipped_max_new(req) * self.new_token_ratio)

    def _fits(self, req: Req, extend_len: int) -> bool:
        if not self.running and not self.can_run_list:
            # A request alone may use all memory; it was checked to fit when it was submitted.
            return round_up_to_page(extend_len, self.page_size) <= self.rem_total_tokens
        return round_up_to_page(extend_len, self.page_size) + _clipped_max_new(req) < self.rem_total_tokens

    def _truncate(self, remaining: int, limit: int | None) -> int:
        """Tokens to compute in this step: all that remain, or as many whole pages as the limit allows."""
        if limit is None or round_up_to_page(remaining, self.page_size) <= limit:
            return remaining
        return max(round_down_to_page(limit, self.page_size), 0)

    def _add(self, req: Req, extend_len: int) -> None:
        """Add a request that computes `extend_len` tokens in this step. Its last chunk also reserves its
        output."""
        prefix_len = len(req.prefix_indices)
        req.fill_ids = (req.origin_input_ids + req.output_ids)[: prefix_len + extend_len]
        req.extend_input_len = extend_len
        self.can_run_list.append(req)
        is_last_chunk = len(req.fill_ids) == req.num_tokens
        num_tokens = round_up_to_page(extend_len, self.page_size)
        self.reserved_tokens += num_tokens + (_clipped_max_new(req) if is_last_chunk else 0)
        self.rem_input_tokens -= num_tokens
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= num_tokens


def _clipped_max_new(req: Req) -> int:
    return min(max(req.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
