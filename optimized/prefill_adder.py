"""Admission of waiting requests to a prefill step: the same budgets, computed no more often than they change.

Differs from reference: the reservations of running requests are summed as an array, and only when a request
might not fit beside the most that they can reserve. Memory is not checked again after a request without a
cached prefix is locked: that lock changes nothing. A dictionary finds the requests that compute a prefix in
this step. Assumes that prompts and outputs do not change during a step. With few running requests it gains
nothing; it never loses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

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
        # Added requests, by the first min_shared_len tokens that they compute.
        self._computing: dict[Hashable, list[Req]] = {}

        # --8<-- [start:prefill-budgets]
        num_mixed = budget.num_mixed_decode_tokens
        self.reserved_tokens = num_mixed + budget.num_reserved_tokens  # by all but `running`
        self._reserved_by_running: int | None = None  # None: not summed yet
        self._most_reserved_by_running = len(running) * int(CLIP_MAX_NEW_TOKENS * self.new_token_ratio)
        self.rem_input_tokens = budget.max_prefill_tokens - num_mixed
        self.rem_chunk_tokens = (
            None if budget.chunked_prefill_size is None else budget.chunked_prefill_size - num_mixed
        )
        # --8<-- [end:prefill-budgets]

    @property
    def rem_total_tokens(self) -> int:  # type: ignore[override]
        """Free tokens, computed at each call because a locked prefix is not evictable."""
        if self._reserved_by_running is None:
            self._reserved_by_running = self._sum_reservations()
        return self._num_free() - self.reserved_tokens - self._reserved_by_running

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
        if matched_len > 0 and not self._fits(req, remaining):
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
        first = self._first_computed(key.token_ids, key.extra_key, matched_len)
        before = key.token_ids[:matched_len] if first in self._computing else []
        return any(other.fill_key_ids[:matched_len] == before for other in self._computing.get(first, ()))

    def _first_computed(self, token_ids: list[int], extra_key: Hashable, start: int) -> Hashable:
        """A key, equal for requests with the same tokens after `start`; None if these are too few to wait
        for."""
        if self.min_shared_len is None:
            return None
        end = start + self.min_shared_len + self.tree_cache.is_bigram
        return (extra_key, start, *token_ids[start:end]) if len(token_ids) >= end else None

    def _sum_reservations(self) -> int:
        num_left = np.fromiter(
            (req.max_new_tokens - len(req.output_ids) for req in self.running), np.int64, len(self.running)
        )
        reserved = num_left.clip(0, CLIP_MAX_NEW_TOKENS) * self.new_token_ratio
        return int(reserved.astype(np.int64).sum())  # each rounded down, as in `_reservation`

    def _reservation(self, req: Req) -> int:
        return int(_clipped_max_new(req) * self.new_token_ratio)

    def _fits(self, req: Req, extend_len: int) -> bool:
        num_needed = round_up_to_page(extend_len, self.page_size)
        if not self.running and not self.can_run_list:
            # A request alone may use all memory; it was checked to fit when it was submitted.
            return num_needed <= self.rem_total_tokens
        num_needed += _clipped_max_new(req)
        num_left = self._num_free() - self.reserved_tokens - self._most_reserved_by_running
        return num_needed < num_left or num_needed < self.rem_total_tokens

    def _truncate(self, remaining: int, limit: int | None) -> int:
        """Tokens to compute in this step: all that remain, or as many whole pages as the limit allows."""
        if limit is None or round_up_to_page(remaining, self.page_size) <= limit:
            return remaining
        return max(round_down_to_page(limit, self.page_size), 0)

    def _add(self, req: Req, extend_len: int) -> None:
        """Add a request that computes `extend_len` tokens in this step. Its last chunk also reserves its
        output."""
        prefix_len = len(req.prefix_indices)
        req.fill_ids = req.all_ids[: prefix_len + extend_len]
        req.extend_input_len = extend_len
        self.can_run_list.append(req)
        first = self._first_computed(req.fill_key_ids, req.extra_key, prefix_len)
        if first is not None:
            self._computing.setdefault(first, []).append(req)
        is_last_chunk = len(req.fill_ids) == req.num_tokens
        num_tokens = round_up_to_page(extend_len, self.page_size)
        self.reserved_tokens += num_tokens + (_clipped_max_new(req) if is_last_chunk else 0)
        self.rem_input_tokens -= num_tokens
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= num_tokens


def _clipped_max_new(req: Req) -> int:
    return min(max(req.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
