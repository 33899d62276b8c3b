"""The order in which waiting requests are tried, as plain sorts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from shared.config import EngineConfig
from shared.interfaces import PolicyResult, PrefixCache, RadixKey
from shared.interfaces import schedule_policy as interface
from shared.types import Req

LPM_QUEUE_LIMIT = 128
"""Matching and sorting a longer queue costs more than a good order saves."""

ROOT_ID = 0


class SchedulePolicy(interface.SchedulePolicy):
    def __init__(self, config: EngineConfig, tree_cache: PrefixCache) -> None:
        self.config = config
        self.tree_cache = tree_cache
        self.rng = random.Random(config.random_seed)

    def order(self, waiting_queue: Sequence[Req], running: Sequence[Req]) -> PolicyResult:
        policy = self._effective_policy(len(waiting_queue))
        queue = list(waiting_queue)
        if policy in ("lpm", "dfs-weight"):
            return self._cache_aware_order(policy, queue)
        if policy == "fcfs" and self.config.enable_priority_scheduling:
            queue.sort(key=lambda req: (-req.priority, req.queue_start_time))
        elif policy == "lof":
            by_priority = self.config.enable_priority_scheduling
            queue.sort(key=lambda req: (-req.priority if by_priority else 0, -req.max_new_tokens))
        elif policy == "random":
            return PolicyResult(self._shuffled(queue), frozenset())
        elif policy == "routing-key":
            counts = Counter(req.routing_key for req in running if req.routing_key is not None)
            queue.sort(key=lambda req: _routing_rank(req, counts))
        return PolicyResult(queue, frozenset())

    def _shuffled(self, queue: list[Req]) -> Iterator[Req]:
        """Each place draws from the remaining requests, so a caller that stops early draws only what it
        needs."""
        for i in range(len(queue)):
            j = self.rng.randrange(i, len(queue))
            queue[i], queue[j] = queue[j], queue[i]
            yield queue[i]

    def _effective_policy(self, num_waiting: int) -> str:
        policy = self.config.schedule_policy
        if policy in ("lpm", "dfs-weight") and self.tree_cache.disable:
            return "fcfs"
        if policy == "lpm" and num_waiting > LPM_QUEUE_LIMIT:
            return "fcfs"
        return policy

    def _cache_aware_order(self, policy: str, queue: list[Req]) -> PolicyResult:
        matched_len, node_of, deprioritized = self._match_prefixes(queue)
        if policy == "lpm":
            queue.sort(key=lambda req: -matched_len[req.rid])
        else:
            queue = _depth_first(queue, node_of, self._parents())
        # A stable partition: requests that wait for a shared prefix go last.
        queue.sort(key=lambda req: req.rid in deprioritized)
        return PolicyResult(queue, deprioritized)

    def _match_prefixes(self, queue: list[Req]) -> tuple[dict[str, int], dict[str, int], frozenset[str]]:
        """Per rid: cached tokens and the node where the match ends; and who shares a prefix that a request
        before it in the queue is about to compute."""
        scratch = type(self.tree_cache)(
            page_size=self.tree_cache.page_size, is_bigram=self.tree_cache.is_bigram
        )
        matched_len: dict[str, int] = {}
        node_of: dict[str, int] = {}
        deprioritized: set[str] = set()
        for req in queue:
            token_ids = req.all_ids
            key = RadixKey(token_ids, req.extra_key, self.tree_cache.is_bigram)
            match = self.tree_cache.match_prefix(key)
            matched_len[req.rid] = len(match.device_indices)
            node_of[req.rid] = self.tree_cache.node_id(match.last_node)
            if matched_len[req.rid] > self.config.in_batch_prefix_check_threshold:
                continue
            num_shared = len(scratch.match_prefix(key).device_indices)
            if num_shared >= self.config.in_batch_prefix_deprioritize_threshold:
                deprioritized.add(req.rid)
            else:
                scratch.insert(key, torch.zeros(len(token_ids), dtype=torch.int64))
        return matched_len, node_of, frozenset(deprioritized)

    def _parents(self) -> dict[int, int]:
        return {node.node_id: node.parent_id for node in self.tree_cache.nodes()}


def _routing_rank(req: Req, counts: Counter[str | None]) -> tuple[int, str]:
    if req.routing_key in counts:
        assert req.routing_key is not None
        return (-counts[req.routing_key], req.routing_key)
    return (1, "")  # behind every key that is running


def _depth_first(queue: list[Req], node_of: dict[str, int], parents: dict[int, int]) -> list[Req]:
    """Requests of one subtree side by side, so that its prefix is used while it is in the cache."""
    weight: Counter[int] = Counter()  # waiting requests in a node's subtree
    first: dict[int, int] = {}  # place in the queue of the first of them
    children: dict[int, list[int]] = {}
    own: dict[int, list[Req]] = {}
    for place, req in enumerate(queue):
        own.setdefault(node_of[req.rid], []).append(req)
        node: int | None = node_of[req.rid]
        while node is not None:
            weight[node] += 1
            first.setdefault(node, place)
            node = parents.get(node)
    for node, parent in parents.items():
        if weight[node]:
            children.setdefault(parent, []).append(node)

    ordered: list[Req] = []
    stack = [(ROOT_ID, False)]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            ordered += own.get(node, [])
            continue
        stack.append((node, True))
        heaviest_first = sorted(children.get(node, []), key=lambda child: (-weight[child], first[child]))
        stack += [(child, False) for child in reversed(heaviest_first)]
    return ordered
