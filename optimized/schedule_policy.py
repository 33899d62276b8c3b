"""The order of waiting requests, updated as requests come and go.

Differs from reference: a pass does not visit every waiting request. The policy follows the queue and applies
its changes since the last pass. Sorted orders are sorted lists; cache-aware orders keep the match of each
request until the tree reports that it changes. Only moving pointers in a list still grows with the queue, by
some nanoseconds per request. Assumes a `WaitingQueue` (another sequence is ordered from scratch, with the
same result) and, for lpm and dfs-weight, a `WatchablePrefixCache`. It loses on short queues of requests that
come and go immediately. A waiting request is not matched again in each pass, so its prefix ages in the cache.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from diptych.optimized.waiting_matches import WaitingMatches
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import PolicyResult, PrefixCache
from diptych.shared.interfaces import schedule_policy as interface
from diptych.shared.scheduling.waiting_queue import Changes, Follower, WaitingQueue
from diptych.shared.types import Req

LPM_QUEUE_LIMIT = 128
"""In a longer queue, matching and sorting cost more than a good order saves."""


class SchedulePolicy(interface.SchedulePolicy):
    def __init__(self, config: EngineConfig, tree_cache: PrefixCache) -> None:
        self.config = config
        self.tree_cache = tree_cache
        self.rng = random.Random(config.random_seed)
        self._by_key = SortedQueue(self._sort_key)
        self._by_route = RoutedQueue()
        self._matches: WaitingMatches | None = None
        if config.schedule_policy in ("lpm", "dfs-weight") and not tree_cache.disable:
            is_depth_first = config.schedule_policy == "dfs-weight"
            self._matches = WaitingMatches(config, tree_cache, is_depth_first)
        # The index that is up to date, and the queue that it follows. The other indexes are empty.
        self._index: SortedQueue | RoutedQueue | WaitingMatches = self._by_key
        self._queue: WaitingQueue | None = None
        self._follower: Follower | None = None

    def order(self, waiting_queue: Sequence[Req], running: Sequence[Req]) -> PolicyResult:
        """The result refers to lists of this object, which do not change until the next call."""
        policy = self._effective_policy(len(waiting_queue))
        if policy in ("lpm", "dfs-weight"):
            return self._cache_aware_order(policy, waiting_queue)
        if policy == "routing-key":
            self._follow(waiting_queue, self._by_route)
            return PolicyResult(self._by_route.order(running), frozenset())
        self._follow(waiting_queue, self._by_key)
        reqs = self._by_key.reqs
        return PolicyResult(self._shuffled(reqs) if policy == "random" else iter(reqs), frozenset())

    def _effective_policy(self, num_waiting: int) -> str:
        policy = self.config.schedule_policy
        if policy in ("lpm", "dfs-weight") and self.tree_cache.disable:
            return "fcfs"
        if policy == "lpm" and num_waiting > LPM_QUEUE_LIMIT:
            return "fcfs"
        return policy

    def _sort_key(self, req: Req) -> tuple[float, float]:
        by_priority, policy = self.config.enable_priority_scheduling, self.config.schedule_policy
        second = {"lof": -req.max_new_tokens, "fcfs": req.queue_start_time if by_priority else 0}
        return -req.priority if by_priority else 0, second.get(policy, 0)

    def _shuffled(self, reqs: list[Req]) -> Iterator[Req]:
        """Each place draws from the remaining requests. `moved`: the requests that draws displaced."""
        moved: dict[int, Req] = {}
        for i in range(len(reqs)):
            j = self.rng.randrange(i, len(reqs))
            drawn = moved.get(j, reqs[j])
            moved[j] = moved.pop(i, reqs[i])
            yield drawn

    def _cache_aware_order(self, policy: str, waiting_queue: Sequence[Req]) -> PolicyResult:
        matches = self._matches
        assert matches is not None
        self._follow(waiting_queue, matches)
        deprioritized = matches.deprioritized
        if policy == "lpm":
            ranks = {req: (req.rid in deprioritized, -matches.by_req[req].length) for req in waiting_queue}
            return PolicyResult(sorted(waiting_queue, key=ranks.__getitem__), deprioritized)
        return PolicyResult(matches.depth_first(), deprioritized)

    def _follow(
        self, waiting_queue: Sequence[Req], index: SortedQueue | RoutedQueue | WaitingMatches
    ) -> None:
        """Bring the index up to date with a queue. A plain sequence is a new queue in each call."""
        queue = waiting_queue if isinstance(waiting_queue, WaitingQueue) else WaitingQueue(waiting_queue)
        if queue is not self._queue or index is not self._index:
            self._index.clear()
            if self._queue is not None and self._follower is not None:
                self._queue.unfollow(self._follower)
            self._index, self._queue, self._follower = index, queue, queue.follow()
        assert self._follower is not None
        index.update(self._follower.take())


class SortedQueue:
    """Waiting requests sorted by a key, and among equal keys in the order of the queue."""

    def __init__(self, key: Callable[[Req], tuple[float, float]]) -> None:
        self.key = key
        self.clear()

    def clear(self) -> None:
        self.reqs: list[Req] = []
        self._keys: list[tuple[float, ...]] = []  # each with the ticket: no two are equal
        self._key_of: dict[Req, tuple[float, ...]] = {}  # a request that left may have changed

    def update(self, changes: Changes) -> None:
        for req in changes.left:
            i = bisect_left(self._keys, self._key_of.pop(req))
            del self.reqs[i], self._keys[i]
        for req, ticket in changes.joined.items():
            key = self._key_of[req] = (*self.key(req), ticket)
            i = bisect_left(self._keys, key)
            self.reqs.insert(i, req)
            self._keys.insert(i, key)


class RoutedQueue:
    """Waiting requests by routing key, for each key in the order of the queue; and all of them."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._all = SortedQueue(lambda req: (0, 0))
        self._waiting: dict[str | None, dict[Req, None]] = {}
        self._running: dict[Req, str | None] = {}  # keys of the last pass: reading a request is a cache miss

    def update(self, changes: Changes) -> None:
        self._all.update(changes)
        for req in changes.left:
            del self._waiting[req.routing_key][req]
        for req in changes.joined:  # appended, because their tickets are the newest
            self._waiting.setdefault(req.routing_key, {})[req] = None

    def order(self, running: Sequence[Req]) -> Iterator[Req]:
        """Requests with a running routing key first, by frequency, then by key; then all others."""
        known = self._running
        # Not `get`, which needs the key of each request beforehand.
        self._running = {req: known[req] if req in known else req.routing_key for req in running}  # noqa: SIM401
        counts = Counter(self._running.values())
        del counts[None]
        most_frequent = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
        with_key = chain.from_iterable(self._waiting.get(key, ()) for key, _ in most_frequent)
        return chain(with_key, (req for req in self._all.reqs if req.routing_key not in counts))
