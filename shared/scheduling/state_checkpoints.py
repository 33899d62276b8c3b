"""States of linear attention for the prefix cache: KV of a prefix is of use only with the state at its end.

A state is kept at few positions, on a grid: at the end of a prompt, where prompts part, and, one for each
request, at the last grid point of its answer. Where drafts are verified there is none of the answer: the CPU
does not know at which step a request comes to a position. As in `host_cache`, the radix tree knows nothing of
it: a table has the checkpoint of each prefix, by a digest of its tokens. A match is the longest prefix that
the tree has KV of and the table a state. States are evicted apart from KV, the least recently used first.

Where prefill and decode are two engines, the state at the end of a prompt goes along with its KV: from a
checkpoint that a transport reads, to the row of the request at the engine that decodes.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from diptych.shared.interfaces import (
    MatchResult,
    PrefixCache,
    RadixKey,
    SchedulerFeature,
    StatePool,
)
from diptych.shared.interfaces.linear_attention import StateStore
from diptych.shared.types import Req

GRID = 64
"""Tokens between two positions at which states may be kept, at least: a chunk of the prefill kernels."""
ROLLING = 256
"""Tokens of an answer between two copies of its state, at least."""
IDLE_SECONDS = 0.001
"""Seconds to wait for a checkpoint if nothing else is to do."""


class StateCheckpoints(SchedulerFeature):
    """Every checkpoint is free, or has one prefix, or one request that has not put it into the table yet, or
    is being sent."""

    def __init__(self, pool: StatePool, page_size: int) -> None:
        self.pool = pool
        self.grid = math.lcm(GRID, page_size)
        self.rolling = math.lcm(ROLLING, self.grid)
        self.cache: Any = None  # the `StatefulCache`
        self.sent: Collection[str] = ()  # ids of requests whose state at the prompt's end is sent
        self.being_sent: set[int] = set()
        self.below: Any = None  # the `HostStates`
        self.clear()

    def clear(self) -> None:
        self.table: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.free = [each for each in self.pool.checkpoints if each not in self.being_sent][::-1]
        self.pinned: set[str] = set()  # with these, requests begin that are about to join
        self.wanted: dict[Req, list[int]] = {}  # positions of a prompt
        self.orders: dict[Req, list[StateStore]] = {}
        self.pool.loads.clear()
        self.pool.stores.clear()

    def digests(self, token_ids: Sequence[int], extra_key: Hashable) -> list[str]:
        """One for each grid point: of all tokens before it, in their namespace."""
        tokens, digest = np.asarray(token_ids, np.int64), hashlib.sha256(repr(extra_key).encode())
        found = []
        for start in range(0, len(tokens) - self.grid + 1, self.grid):
            digest.update(tokens[start : start + self.grid].tobytes())
            found.append(digest.hexdigest())
        return found

    def longest(self, key: RadixKey, num_tokens: int, goes_below: bool = False) -> int:
        """Tokens of the longest prefix that has a state (goes_below: on the device or in CPU memory), at most
        `num_tokens`."""
        digests = self.digests(key.token_ids[:num_tokens], key.extra_key)
        for n in range(len(digests), 0, -1):
            if digests[n - 1] in self.table:
                self.table.move_to_end(digests[n - 1])
                return n * self.grid
            if goes_below and self.below is not None and digests[n - 1] in self.below.pages:
                return n * self.grid
        return 0

    def bring(self, key: RadixKey, num_tokens: int) -> None:
        """Bring the last state of these tokens back, if CPU memory alone has it. It stays
        until the request that joins has begun with it."""
        num_tokens = self.longest(key, num_tokens, goes_below=True)
        if num_tokens == 0:
            return
        digest = self.digests(key.token_ids[:num_tokens], key.extra_key)[-1]
        if digest not in self.table:
            checkpoint = self._take()
            if checkpoint is None:
                return
            assert self.below is not None
            self.below.load(digest, checkpoint)
            self.table[digest] = checkpoint
        self.pinned.add(digest)

    def _take(self) -> int | None:
        """A checkpoint for another state: a free one, or the least recently used one."""
        if self.free:
            return self.free.pop()
        oldest = next((digest for digest in self.table if digest not in self.pinned), None)
        return None if oldest is None else self.table.pop(oldest)

    def may_join(self, req: Req, running: Sequence[Req], new: Sequence[Req]) -> bool:
        """A state that is sent needs a checkpoint; those that are being sent come back."""
        num_needed = sum(each.rid in self.sent and each not in self.orders for each in (*new, req))
        may_join = len(self.free) + len(self.table) >= num_needed
        if not new:
            self.pinned.clear()  # those of a step in which they did not join
        if not (may_join or running or new):
            time.sleep(IDLE_SECONDS)
        return may_join

    def have_joined(self, new: Sequence[Req], running: Sequence[Req]) -> None:
        """Order the load of each request that begins behind a prefix, and the stores of this step. Loads
        come first: a store may take the checkpoint that another request begins with."""
        begun = [req for req in new if req not in self.orders]
        for req in begun:
            self._begin(req)
        self.pinned.clear()
        for req in begun:
            if req.rid in self.sent:
                self._order(req, StateStore(-1, req.num_tokens, is_sent=True))
                assert self.orders[req], "no checkpoint for a state that is sent: see may_join"
        for req in new:
            start, end = len(req.prefix_indices), len(req.fill_ids)
            for position in self.wanted[req]:
                if start < position <= end:
                    self._order(req, StateStore(-1, position))
            first = (end // self.rolling + 1) * self.rolling
            most = 0 if self.pool.num_nodes else len(req.origin_input_ids) + req.max_new_tokens
            if end == req.num_tokens and first < most:
                self._order(req, StateStore(-1, first, self.rolling))

    # --8<-- [start:state-orders]
    def _begin(self, req: Req) -> None:
        assert req.req_pool_idx is not None
        matched = req.kv_matched_len
        if matched:
            digest = self.digests(req.key_ids[:matched], req.extra_key)[-1]
            self.pool.loads[req.req_pool_idx] = self.table[digest]
        # Where this prompt leaves another one whose KV is there, and where it ends.
        is_bigram = self.cache.is_bigram
        key = RadixKey(req.key_ids[: req.num_tokens - 1 + is_bigram], req.extra_key, is_bigram)
        kv_len = len(self.cache.match_kv(key).device_indices)
        ends = {n // self.grid * self.grid for n in (kv_len, req.num_tokens - 1)}
        self.wanted[req] = sorted(n for n in ends if n > matched)
        self.orders[req] = self.pool.stores[req.req_pool_idx] = []
        # --8<-- [end:state-orders]

    def _order(self, req: Req, store: StateStore) -> None:
        checkpoint = self._take()
        if checkpoint is not None:  # else there is no state, and nothing else changes
            store.checkpoint = checkpoint
            self.orders[req].append(store)

    def keep(self, req: Req, num_tokens: int, is_end: bool) -> None:
        """Put a request's states of at most `num_tokens` tokens into the table: the tree has their KV."""
        orders = self.orders.get(req, [])
        digests = self.digests(req.key_ids[:num_tokens], req.extra_key)
        for store in list(orders):
            if store.stored is None or store.stored > num_tokens or (store.every and not is_end):
                continue
            if store.is_sent:
                continue
            digest = digests[store.stored // self.grid - 1]
            orders.remove(store)
            if digest in self.table:
                self.free.append(store.checkpoint)
            else:
                self.table[digest] = store.checkpoint
            self.table.move_to_end(digest)
            if self.below is not None:
                self.below.store(digest, self.table[digest])

    # --8<-- [start:states-of-split-servers]
    def begin_sending(self, req: Req) -> int:
        """The checkpoint with the state at the end of a prompt, for a transport."""
        (store,) = (each for each in self.orders[req] if each.is_sent)
        assert store.stored == len(req.origin_input_ids), f"a state of {store.stored} tokens"
        self.orders[req].remove(store)
        self.being_sent.add(store.checkpoint)
        return store.checkpoint

    def end_sending(self, checkpoint: int) -> None:
        self.being_sent.remove(checkpoint)
        self.free.append(checkpoint)

    def has_come(self, req: Req, first_token: int, draft_state: bytes) -> None:
        """Its row has the state at the end of its prompt: nothing is loaded."""
        assert req.req_pool_idx is not None
        self.pool.has_come(req.req_pool_idx, len(req.fill_ids))
        self.wanted[req] = []
        self.orders[req] = self.pool.stores[req.req_pool_idx] = []
        # --8<-- [end:states-of-split-servers]

    def forget(self, req: Req) -> None:
        """The request gives up its row: what it has not put into the table is free."""
        assert req.req_pool_idx is not None
        self.free += [store.checkpoint for store in self.orders.pop(req, [])]
        self.wanted.pop(req, None)
        self.pool.loads.pop(req.req_pool_idx, None)
        self.pool.stores.pop(req.req_pool_idx, None)

    def forget_all_kept(self) -> None:
        """States of some prefix may hold NaN, and those that were computed from them."""
        self.free += self.table.values()
        self.table.clear()

    def check(self) -> None:
        ordered = [store.checkpoint for orders in self.orders.values() for store in orders]
        owned = sorted([*self.free, *self.table.values(), *ordered, *self.being_sent])
        assert owned == list(self.pool.checkpoints), f"owners of states: {owned}"


def with_states(cache_class: type[PrefixCache], states: StateCheckpoints) -> type[PrefixCache]:
    """The class of a prefix cache whose matches end where there is a state."""

    # --8<-- [start:match-with-state]
    class StatefulCache(cache_class):  # type: ignore[misc, valid-type]
        def match_prefix(self, key: RadixKey) -> MatchResult:
            match: MatchResult = super().match_prefix(key)
            if self.allocator is None:  # a policy makes caches of this class without pools
                return match
            num_kv = len(match.device_indices)
            num_tokens = states.longest(key, num_kv)
            if num_tokens == num_kv:
                return match
            token_ids = key.token_ids[: num_tokens + key.is_bigram]
            shorter: MatchResult = super().match_prefix(replace(key, token_ids=token_ids))
            return shorter
            # --8<-- [end:match-with-state]

        def match_kv(self, key: RadixKey) -> MatchResult:
            match: MatchResult = super().match_prefix(key)
            return match

        def cache_unfinished_req(self, req: Req) -> None:
            super().cache_unfinished_req(req)
            states.keep(req, len(req.fill_ids), is_end=False)

        def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
            if is_insert:
                states.keep(req, req.kv_committed_len, is_end=True)
            states.forget(req)
            super().cache_finished_req(req, is_insert)

        def discard(self, key: RadixKey, start: int) -> None:
            states.forget_all_kept()
            super().discard(key, start)

        def reset(self) -> None:
            super().reset()
            if self.allocator is not None:
                states.clear()
                states.cache = self

    return StatefulCache
