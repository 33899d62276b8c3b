"""A prefix cache with pools, and requests that allocate, cache and free as a scheduler would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.interfaces import PrefixCache, RadixKey, SchedulerState
from diptych.shared.scheduling.invariants import check_idle, check_invariants
from diptych.shared.scheduling.pages import round_up_to_page
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.types import Req, SamplingParams

NUM_ROWS = 8


class CacheWorld:
    """Pools, a cache, and live requests. `kv` records what each slot was computed from: the namespace and all
    tokens up to the slot's position. A slot that is freed too early, or shared wrongly, has a wrong
    record."""

    def __init__(
        self,
        impl: type[PrefixCache],
        page_size: int,
        num_pages: int = 32,
        *,
        max_len: int = 256,
        **options: Any,
    ) -> None:
        pools = registry.load("memory_pool", "reference")
        self.page_size = page_size
        self.is_bigram = options.get("is_bigram", False)
        self.allocator = pools.TokenToKVPoolAllocator(num_pages * page_size, page_size, check_device())
        self.req_to_token_pool = pools.ReqToTokenPool(NUM_ROWS, max_len, check_device())
        self.on_free: Callable[[torch.Tensor], None] | None = None  # sees what is freed, before it is
        self.allocator.free = partial(self._free, self.allocator.free)
        self.cache = impl(page_size, self.allocator, self.req_to_token_pool, **options)
        self.live: list[Req] = []
        self.num_admitted = 0
        self.kv: dict[int, tuple[Any, ...]] = {}

    def admit(
        self, tokens: Sequence[int], chunk: int | None = None, extra_key: str | None = None, priority: int = 0
    ) -> Req | None:
        """Match, lock, and compute the prompt (or `chunk` tokens of it). None if memory does not suffice;
        then only access times and node boundaries of the cache have changed."""
        self.num_admitted += 1
        req = Req(
            rid=f"req-{self.num_admitted}",
            origin_input_ids=list(tokens),
            sampling_params=SamplingParams(),
            seed=0,
            extra_key=extra_key,
            priority=priority,
        )
        return req if self._start(req, chunk) else None

    def readmit(self, req: Req) -> bool:
        """Admit again after a retraction."""
        return self._start(req, None)

    def extend(self, req: Req, chunk: int | None = None) -> bool:
        """Compute up to `chunk` tokens behind prefix_indices. False: no memory, nothing changed."""
        start = len(req.prefix_indices)
        end = req.num_tokens if chunk is None else min(start + chunk, req.num_tokens)
        self._make_room(round_up_to_page(end, self.page_size) - start)
        last_loc = int(req.prefix_indices[-1]) if start else -1
        slots = self.allocator.alloc_extend([start], [end], [last_loc])
        if slots is None:
            return False
        self.req_to_token_pool.write(req.req_pool_idx, start, slots)
        self._compute(req, start, slots)
        req.fill_ids = req.all_ids[:end]
        req.extend_input_len = end - start
        req.kv_committed_len = req.kv_allocated_len = end
        return True

    def cache_unfinished(self, req: Req) -> None:
        self.cache.cache_unfinished_req(req)

    def prefill(self, tokens: Sequence[int], **options: Any) -> Req:
        """Admit, compute and cache a whole prompt that is known to fit."""
        req = self.admit(tokens, **options)
        if req is None:
            raise ValueError(f"{len(tokens)} tokens do not fit")
        self.cache_unfinished(req)
        return req

    def decode(self, req: Req, next_token: int) -> bool:
        """One step: KV for the newest token, then one more token. False: no memory."""
        if req.num_tokens == req.kv_committed_len:
            req.output_ids.append(next_token)
        position = req.kv_committed_len
        self._make_room(self.page_size if position % self.page_size == 0 else 0)
        last_loc = int(self.req_to_token_pool.read(req.req_pool_idx, position - 1, position))
        slots = self.allocator.alloc_decode([position + 1], [last_loc])
        if slots is None:
            return False
        self.req_to_token_pool.write(req.req_pool_idx, position, slots)
        self._compute(req, position, slots)
        req.kv_committed_len = req.kv_allocated_len = position + 1
        req.output_ids.append(next_token)
        return True

    def over_allocate(self, req: Req, num_tokens: int) -> bool:
        """Slots for tokens that are never committed: a step in flight, or rejected drafts. False: no room."""
        start = req.kv_allocated_len
        last_loc = int(self.req_to_token_pool.read(req.req_pool_idx, start - 1, start))
        slots = self.allocator.alloc_extend([start], [start + num_tokens], [last_loc])
        if slots is None:
            return False
        self.req_to_token_pool.write(req.req_pool_idx, start, slots)
        req.kv_allocated_len = start + num_tokens
        return True

    def finish(self, req: Req, is_insert: bool = True) -> None:
        self.live.remove(req)
        self.cache.cache_finished_req(req, is_insert)
        expect_equal("req_pool_idx of a finished request", req.req_pool_idx, None)

    def retract(self, req: Req) -> None:
        self.finish(req, is_insert=False)
        req.reset_for_retraction()

    def row(self, req: Req) -> list[int]:
        slots: list[int] = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len).tolist()
        return slots

    def match(self, tokens: Sequence[int], extra_key: str | None = None) -> list[int]:
        key = RadixKey(list(tokens), extra_key, self.is_bigram)
        slots: list[int] = self.cache.match_prefix(key).device_indices.tolist()
        return slots

    def check(self) -> None:
        """Check all invariants, and that every live request reads KV computed from its own tokens."""
        state = SchedulerState(running=list(self.live))
        check_invariants(state, self.allocator, self.req_to_token_pool, self.cache)
        for req in self.live:
            row = self.row(req)
            for position, slot in enumerate(row[: req.kv_committed_len]):
                expect_equal(
                    f"what {req.rid} reads at {position}", self.kv.get(slot), self._content(req, position)
                )
            prefix = req.prefix_indices.tolist()
            expect_equal(f"{req.rid}'s prefix_indices", prefix, row[: len(prefix)])

    def expect_idle(self) -> None:
        """Check that no request is live and no slot is lost: a slot that is not free is in the tree and
        evictable."""
        expect_equal("live requests", self.live, [])
        check_idle(self.allocator, self.req_to_token_pool, self.cache)
        num_cached = self.cache.evictable_size()
        expect_equal("free + cached", self.allocator.available_size() + num_cached, self.allocator.size)
        expect_equal("evict() of everything", self.cache.evict(self.allocator.size), num_cached)
        expect_equal("free slots when all is evicted", self.allocator.available_size(), self.allocator.size)

    def _free(self, free: Callable[[torch.Tensor], None], slots: torch.Tensor) -> None:
        if self.on_free is not None:
            self.on_free(slots)
        free(slots)

    def _start(self, req: Req, chunk: int | None) -> bool:
        key = RadixKey(req.all_ids[: req.max_prefix_len], req.extra_key, self.is_bigram)
        match = self.cache.match_prefix(key)
        self.cache.inc_lock_ref(match.last_node)
        req.last_node = match.last_node
        req.prefix_indices = match.device_indices
        req.cache_protected_len = req.kv_committed_len = req.kv_allocated_len = len(match.device_indices)
        (req.req_pool_idx,) = self.req_to_token_pool.alloc(1)
        self.req_to_token_pool.write(req.req_pool_idx, 0, match.device_indices)
        self.live.append(req)
        if not self.extend(req, chunk):
            self.finish(req, is_insert=False)
            return False
        return True

    def _make_room(self, num_tokens: int) -> None:
        missing = num_tokens - self.allocator.available_size()
        if missing > 0:
            num_evictable = self.cache.evictable_size()
            num_evicted = self.cache.evict(missing)
            expect_true(
                f"evict({missing}) of {num_evictable} frees enough",
                num_evicted >= min(missing, num_evictable),
                num_evicted,
            )

    def _compute(self, req: Req, start: int, slots: torch.Tensor) -> None:
        for position, slot in enumerate(slots.tolist(), start):
            self.kv[slot] = self._content(req, position)

    def _content(self, req: Req, position: int) -> tuple[Any, ...]:
        return (req.extra_key, *req.all_ids[: position + 1])
