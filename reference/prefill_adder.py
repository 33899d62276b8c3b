"""Which waiting requests fit into this step: explicit budgets, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

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
    def rem_total_tokens(self) -> int:
        """Read afresh each time: locking a prefix shrinks what is evictable."""
        free = self.allocator.available_size() + self.tree_cache.evictable_size()
        return free - self.reserved_tokens

    def add_chunked_req(self, req: Req) -> Req | None:
        prefix_len = len(req.prefix_indices)
        remaining = req.num_tokens - prefix_len
        # What this step's decoding and the other requests' outputs reserve does not count here: a prompt that
        # was begun goes on, on whatever memory there is.
        room = self.allocator.available_size() + self.tree_cache.evictable_size()
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

    # --8<-- [start:add-one-req]
    def add_one_req(self, req: Req) -> AddReqResult:
        key = prefix_key(req, self.tree_cache.is_bigram)
        match = self.tree_cache.match_prefix(key)
        if self._is_computed_now(key, len(match.device_indices)):
            self.num_waits += 1
            return AddReqResult.WAIT if self.num_waits <= MAX_WAITS else AddReqResult.OTHER
        remaining = req.num_tokens - len(match.device_indices)
        if not self._fits(req, remaining):
            return AddReqResult.NO_TOKEN
        if self._ceil(remaining) >= self.rem_input_tokens and self.can_run_list:
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
        req.cache_protected_len = len(match.device_indices)
        self._extend(req, extend_len)
        # --8<-- [end:add-one-req]
        if extend_len < remaining:
            self.new_chunked_req = req
            self._charge(extend_len, max_new_tokens=0)
        else:
            self._charge(extend_len, _clipped_max_new(req))
        return AddReqResult.CONTINUE

    def preempt_to_schedule(self, req: Req, min_priority_gap: int) -> list[Req]:
        missing = self._ceil(req.num_tokens) + _clipped_max_new(req) + 1 - self.rem_total_tokens
        candidates = [r for r in self.running if req.priority - r.priority > min_priority_gap]
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
        for victim in victims:
            self.running.remove(victim)
            self.reserved_tokens -= self._reservation(victim)
        return victims

    def _is_computed_now(self, key: RadixKey, matched_len: int) -> bool:
        """Whether one that was added leaves enough in the cache that the key goes on with."""
        if self.worth_waiting is None or len(key) < matched_len + self.worth_waiting:
            return False
        wanted = key.token_ids[: matched_len + self.worth_waiting + key.is_bigram]
        return any(
            len(other.prefix_indices) == matched_len
            and other.extra_key == key.extra_key
            and other.fill_ids[: len(wanted)] == wanted
            for other in self.can_run_list
        )

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

    def _charge(self, extend_len: int, max_new_tokens: int) -> None:
        num_tokens = self._ceil(extend_len)
        self.reserved_tokens += num_tokens + max_new_tokens
        self.rem_input_tokens -= num_tokens
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= num_tokens

    def _ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size


def _clipped_max_new(req: Req) -> int:
    return min(max(req.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
