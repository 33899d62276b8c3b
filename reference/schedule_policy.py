"""The order of waiting requests, by plain sorts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import MatchResult, PolicyResult, PrefixCache, RadixKey
from diptych.shared.interfaces import schedule_policy as interface
from diptych.shared.types import Req

LPM_QUEUE_LIMIT = 128
"""In a longer queue, matching and sorting cost more than a good order saves."""

ROOT_ID = 0


class SchedulePolicy(interface.SchedulePolicy):
    def __init__(self, config: EngineConfig, tree_cache: PrefixCache) -> None:
        self.config = config
        self.tree_cache = tree_cache
        self.rng = random.Random(config.random_seed)

    def order(self, waiting_queue: Sequence[Req], running: Sequence[Req]) -> PolicyResult:
        policy = self._effective_policy(len(waiting_queue))
        if policy in ("lpm", "dfs-weight"):
            return self._cache_aware_order(policy, waiting_queue)
        if policy == "routing-key":
            counts = Counter(req.routing_key for req in running if req.routing_key is not None)
            return PolicyResult(_by_routing_key(waiting_queue, counts), frozenset())
        reqs = sorted(waiting_queue, key=self._sort_key)
        return PolicyResult(self._shuffled(reqs) if policy == "random" else reqs, frozenset())

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
        """A random order. Each place draws from the remaining requests, so a caller that stops early makes
        few draws."""
        for i in range(len(reqs)):
            j = self.rng.randrange(i, len(reqs))
            reqs[i], reqs[j] = reqs[j], reqs[i]
            yield reqs[i]

    def _cache_aware_order(self, policy: str, waiting_queue: Sequence[Req]) -> PolicyResult:
        matches, deprioritized = self._match_prefixes(waiting_queue)
        if policy == "lpm":
            reqs = sorted(waiting_queue, key=lambda req: -len(matches[req].device_indices))
        else:
            last_nodes = {req: self.tree_cache.node_id(matches[req].last_node) for req in waiting_queue}
            parents = {node.node_id: node.parent_id for node in self.tree_cache.nodes()}
            reqs = _depth_first(last_nodes, parents)
        reqs.sort(key=lambda req: req.rid in deprioritized)  # stable: deprioritized requests go last
        return PolicyResult(reqs, deprioritized)

    def _match_prefixes(self, queue: Sequence[Req]) -> tuple[dict[Req, MatchResult], frozenset[str]]:
        """The cached prefix of each request; and the rids of requests that share a prefix with an earlier
        request of the queue, which computes it in this step."""
        page_size, is_bigram = self.tree_cache.page_size, self.tree_cache.is_bigram
        computed_now = type(self.tree_cache)(page_size=page_size, is_bigram=is_bigram)
        matches: dict[Req, MatchResult] = {}
        deprioritized: set[str] = set()
        for req in queue:
            key = RadixKey(req.key_ids, req.extra_key, is_bigram)
            matches[req] = self.tree_cache.match_prefix(key)
            if len(matches[req].device_indices) > self.config.in_batch_prefix_check_threshold:
                continue
            num_shared = len(computed_now.match_prefix(key).device_indices)
            if num_shared >= self.config.in_batch_prefix_deprioritize_threshold:
                deprioritized.add(req.rid)
            else:
                computed_now.insert(key, torch.zeros(req.num_tokens, dtype=torch.int64))
        return matches, frozenset(deprioritized)


def _by_routing_key(queue: Sequence[Req], counts: Counter[str]) -> list[Req]:
    """Requests with a running routing key first, by frequency, then by key; then all others."""

    def rank(req: Req) -> tuple[int, str]:
        key = req.routing_key
        return (1, "") if key is None or key not in counts else (-counts[key], key)

    return sorted(queue, key=rank)


def _depth_first(last_nodes: dict[Req, int], parents: dict[int, int]) -> list[Req]:
    """Requests of one subtree next to each other, so that they run while its prefix is cached. `last_nodes`:
    the node at which the match of each request ends, in the order of the queue."""
    weight: Counter[int] = Counter()  # waiting requests in a node's subtree
    first: dict[int, int] = {}  # queue position of the first of them
    own: dict[int, list[Req]] = {}
    for place, (req, last_node) in enumerate(last_nodes.items()):
        own.setdefault(last_node, []).append(req)
        node: int | None = last_node
        while node is not None:
            weight[node] += 1
            first.setdefault(node, place)
            node = parents.get(node)
    children: dict[int, list[int]] = {}
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
