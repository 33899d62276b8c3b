"""Which waiting requests fit into this step: the same budgets, looked at no more often than they change.

Differs from reference: what running requests reserve is summed as an array, and only once a request is to be
added: a step that only goes on with a cut prompt sums nothing. Memory is not looked at again after the lock
of a request that found nothing in the cache: locking the root changes nothing. Who computes a prefix now is
looked up in a dictionary. Assumes, like the reference, that prompts and outputs do not change during a step.
It never loses; with a handful of running requests it gains nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from shared.interfaces import (
    CLIP_MAX_NEW_TOKENS,
    MAX_WAITS,
    AddReqResult,
    PrefillBudget,
    PrefixCache,
    RadixKey,
    TokenToKVPoolAllocator,
)
from shared.interfaces import prefill_adder as interface
from shared.scheduling.admission import prefix_key
from shared.types import Req


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
        self.worth_waiting = None if threshold is None else self._ceil(max(threshold, 1))
        # Who was added, by the first tokens that it computes, as many as are worth waiting for.
        self._computing: dict[Hashable, list[Req]] = {}

        num_mixed = budget.num_mixed_decode_tokens
        # Reserved by what is not running, and less for those preempted.
        self.charged_tokens = num_mixed + budget.num_reserved_tokens
        self._reserved_by_running: int | None = None  # None: not summed yet
        self.rem_input_tokens = budget.max_prefill_tokens - num_mixed
        self.rem_chunk_tokens = (
            None if budget.chunked_prefill_size is None else budget.chunked_prefill_size - num_mixed
        )

    @property
    def rem_total_tokens(self) -> int:
        """Read afresh each time: locking a prefix shrinks what is evictable."""
        if self._reserved_by_running is None:
            self._reserved_by_running = self._sum_reservations()
        return self._room() - self.charged_tokens - self._reserved_by_running

    def add_chunked_req(self, req: Req) -> Req | None:
        prefix_len = len(req.prefix_indices)
        remaining = req.num_tokens - prefix_len
        # What this step's decoding and the other requests' outputs reserve does not count here: a prompt that
        # was begun goes on, on whatever memory there is.
        room = self._room()
        limit = room if self.rem_chunk_tokens is None else min(room, self.rem_chunk_tokens)
        extend_len = self._truncate(remaining, limit)
        if extend_len == 0:
            return req
        self._extend(req, extend_len)
        if extend_len < remaining:
            self._charge(extend_len, max_new_tokens=0)
            return req
        self._charge(extend_len, _clipped_max_new(req))
        return None

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
        if self._ceil(remaining) >= self.rem_input_tokens and self.can_run_list:
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
        self._extend(req, extend_len)
        if extend_len < remaining:
            self.new_chunked_req = req
            self._charge(extend_len, max_new_tokens=0)
        else:
            self._charge(extend_len, _clipped_max_new(req))
        return AddReqResult.CONTINUE

    def preempt_to_schedule(self, req: Req, min_priority_gap: int) -> list[Req]:
        candidates = [r for r in self.running if req.priority - r.priority > min_priority_gap]
        if not candidates:
            return []
        missing = self._ceil(req.num_tokens) + _clipped_max_new(req) + 1 - self.rem_total_tokens
        candidates.sort(key=lambda r: (r.priority, -r.queue_start_time))
        victims: list[Req] = []
        for victim in candidates:
            if victims and missing <= 0:
                break
            victims.append(victim)
            # Only what is the victim's alone; its prefix may be shared.
            missing -= victim.kv_allocated_len - victim.cache_protected_len + self._reservation(victim)
        if missing > 0:
            return []
        gone = set(victims)
        self.running = [r for r in self.running if r not in gone]
        self.charged_tokens -= sum(self._reservation(victim) for victim in victims)
        return victims

    def _room(self) -> int:
        return self.allocator.available_size() + self.tree_cache.evictable_size()

    def _is_computed_now(self, key: RadixKey, matched_len: int) -> bool:
        """Whether one that was added leaves enough in the cache that the key goes on with."""
        first = self._first_computed(key.token_ids, key.extra_key, matched_len)
        before = key.token_ids[:matched_len]
        return any(other.fill_ids[:matched_len] == before for other in self._computing.get(first, ()))

    def _first_computed(self, token_ids: list[int], extra_key: str | None, start: int) -> Hashable:
        """Equal for those that go on alike behind `start`, None where that is too short to wait for."""
        if self.worth_waiting is None:
            return None
        end = start + self.worth_waiting + self.tree_cache.is_bigram
        return (extra_key, start, *token_ids[start:end]) if len(token_ids) >= end else None

    def _sum_reservations(self) -> int:
        num_left = np.fromiter(
            (req.max_new_tokens - len(req.output_ids) for req in self.running), np.int64, len(self.running)
        )
        reserved = num_left.clip(0, CLIP_MAX_NEW_TOKENS) * self.new_token_ratio
        return int(reserved.astype(np.int64).sum())  # each cut to a whole number, as `_reservation` does

    def _reservation(self, req: Req) -> int:
        return int(_clipped_max_new(req) * self.new_token_ratio)

    def _fits(self, req: Req, extend_len: int) -> bool:
        if not self.running and not self.can_run_list:
            # Alone, it has all the memory there is, and it was checked on submission to fit into that.
            return self._ceil(extend_len) <= self.rem_total_tokens
        return self._ceil(extend_len) + _clipped_max_new(req) < self.rem_total_tokens

    def _truncate(self, remaining: int, limit: int | None) -> int:
        """Tokens to compute now: all that remain, or as many whole pages as the limit allows."""
        if limit is None or self._ceil(remaining) <= limit:
            return remaining
        return max(limit // self.page_size, 0) * self.page_size

    def _extend(self, req: Req, extend_len: int) -> None:
        prefix_len = len(req.prefix_indices)
        req.fill_ids = req.all_ids[: prefix_len + extend_len]
        req.extend_input_len = extend_len
        self.can_run_list.append(req)
        first = self._first_computed(req.fill_ids, req.extra_key, prefix_len)
        if first is not None:
            self._computing.setdefault(first, []).append(req)

    def _charge(self, extend_len: int, max_new_tokens: int) -> None:
        num_tokens = self._ceil(extend_len)
        self.charged_tokens += num_tokens + max_new_tokens
        self.rem_input_tokens -= num_tokens
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= num_tokens

    def _ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size


def _clipped_max_new(req: Req) -> int:
    return min(max(req.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
