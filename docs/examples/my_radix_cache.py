"""A simple, complete prefix cache. Check it:

diptych check radix_cache docs/examples/my_radix_cache.py:MyRadixCache

Sizes and leaves are computed on each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import torch

from diptych.shared.interfaces import (
    CacheNode,
    InsertResult,
    MatchResult,
    PrefixCache,
    RadixKey,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)
from diptych.shared.types import Req

Page = tuple[Any, ...]  # (namespace, token, token, ...): pages of different namespaces are never equal

ORDERS = {
    "lru": lambda node: node.used,
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: node.created,
    "mru": lambda node: -node.used,
    "filo": lambda node: -node.created,
    "slru": lambda node: (node.hits >= 2, node.used),
    "priority": lambda node: (node.priority, node.used),
}


@dataclass(eq=False)
class Node:
    number: int
    parent: Node | None
    pages: list[Page]
    slots: torch.Tensor
    created: int
    used: int
    priority: int = 0
    hits: int = 0
    lock_ref: int = 0
    children: dict[Page, Node] = field(default_factory=dict)  # by the first page


class MyRadixCache(PrefixCache):
    def __init__(
        self,
        page_size: int,
        allocator: TokenToKVPoolAllocator | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        eviction_policy: str = "lru",
        is_bigram: bool = False,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, must be at least 1")
        if eviction_policy not in ORDERS:
            raise ValueError(f"eviction_policy is {eviction_policy!r}, must be one of {', '.join(ORDERS)}")
        self.page_size = page_size
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.order = ORDERS[eviction_policy]
        self.is_bigram = is_bigram
        self.device = torch.device("cpu") if allocator is None else allocator.slot_device
        self.reset()

    # --8<-- [start:match-and-insert]
    def match_prefix(self, key: RadixKey) -> MatchResult:
        node = self._walk(self._pages(key))
        return MatchResult(self._slots(node), node)

    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        pages = self._pages(key)
        node = self._walk(pages)
        num_found = sum(len(each.pages) for each in self._path(node))
        prefix_len = num_found * self.page_size
        if num_found < len(pages):
            slots = value[prefix_len : len(pages) * self.page_size].to(torch.int64, copy=True)
            node = self._new_node(node, pages[num_found:], slots)
            node.priority = priority
        for each in self._path(node):
            each.priority = max(each.priority, priority)
        return InsertResult(prefix_len, node)

    # --8<-- [end:match-and-insert]

    def inc_lock_ref(self, node: Node) -> None:
        for each in self._path(node):
            each.lock_ref += 1

    def dec_lock_ref(self, node: Node) -> None:
        for each in self._path(node):
            assert each.lock_ref > 0, f"node {each.number} is not locked"
            each.lock_ref -= 1

    # --8<-- [start:evict]
    def evict(self, num_tokens: int) -> int:
        num_evicted = 0
        while num_evicted < num_tokens:
            leaves = [node for node in self._all() if not node.children and node.lock_ref == 0]
            if not leaves:
                break
            leaf = min(leaves, key=self.order)
            del leaf.parent.children[leaf.pages[0]]
            if self.allocator is not None:
                self.allocator.free(leaf.slots)
            num_evicted += len(leaf.slots)
        return num_evicted

    # --8<-- [end:evict]

    def discard(self, key: RadixKey, start: int) -> None:
        begin = 0
        for node in self._path(self._walk(self._pages(key))):
            if begin >= start and node.lock_ref == 0:  # descendants of an unlocked node are unlocked
                del node.parent.children[node.pages[0]]
                if self.allocator is not None:
                    self.allocator.free(torch.cat([node.slots, *(each.slots for each in self._below(node))]))
                return
            begin += len(node.slots)

    def cache_unfinished_req(self, req: Req) -> None:
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, len(req.fill_ids))
        key = RadixKey(req.fill_ids, req.extra_key, self.is_bigram)
        prefix_len, node = self.insert(key, slots, req.priority)
        shared = self._slots(node)
        self.req_to_token_pool.write(req.req_pool_idx, 0, shared)
        self.allocator.free(slots[req.cache_protected_len : prefix_len])
        self.inc_lock_ref(node)
        self._unlock(req)
        req.last_node = node
        req.cache_protected_len = len(shared)
        req.prefix_indices = torch.cat([shared, slots[len(shared) :]])

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len)
        start = end = req.cache_protected_len  # [start, end): slots that the tree takes
        if is_insert:
            key = RadixKey(req.all_ids[: req.kv_committed_len], req.extra_key, self.is_bigram)
            start = max(start, self.insert(key, slots, req.priority).prefix_len)
            end = max(start, len(self._pages(key)) * self.page_size)
        self.allocator.free(torch.cat([slots[req.cache_protected_len : start], slots[end:]]))
        self._unlock(req)
        self.req_to_token_pool.free([req.req_pool_idx])
        req.req_pool_idx = None
        req.prefix_indices = slots[:0]
        req.cache_protected_len = req.kv_committed_len = req.kv_allocated_len = 0

    def evictable_size(self) -> int:
        return sum(len(node.slots) for node in self._all() if node.lock_ref == 0)

    def protected_size(self) -> int:
        return sum(len(node.slots) for node in self._all() if node.lock_ref > 0)

    def reset(self) -> None:
        self.num_nodes = 0
        self.time = 0
        self.root = self._new_node(None, [], torch.empty(0, dtype=torch.int64, device=self.device))

    def node_id(self, node: Node) -> int:
        return node.number

    def nodes(self) -> Iterator[CacheNode]:
        for node in self._all():
            tokens = [token for page in node.pages for token in page[1:]]
            slots, namespace = node.slots.tolist(), node.pages[0][0]
            yield CacheNode(node.number, node.parent.number, tokens, slots, node.lock_ref, namespace)

    def _pages(self, key: RadixKey) -> list[Page]:
        entries = list(pairwise(key.token_ids)) if key.is_bigram else key.token_ids
        starts = range(0, len(entries) - self.page_size + 1, self.page_size)
        return [(key.extra_key, *entries[start : start + self.page_size]) for start in starts]

    # --8<-- [start:walk-and-split]
    def _walk(self, pages: list[Page]) -> Node:
        """The deepest node on the path of `pages`; a node left in the middle is split."""
        self.time += 1
        node, start = self.root, 0
        while start < len(pages) and pages[start] in node.children:
            node = node.children[pages[start]]
            pairs = zip(node.pages, pages[start:])
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if count < len(node.pages):
                node = self._split(node, count)
            node.used = self.time
            node.hits += 1
            start += count
        return node

    def _split(self, lower: Node, count: int) -> Node:
        num_tokens = count * self.page_size
        upper = self._new_node(lower.parent, lower.pages[:count], lower.slots[:num_tokens])
        upper.created, upper.used = lower.created, lower.used
        upper.priority, upper.hits = lower.priority, lower.hits
        upper.lock_ref, lower.parent = lower.lock_ref, upper
        lower.pages, lower.slots = lower.pages[count:], lower.slots[num_tokens:]
        upper.children[lower.pages[0]] = lower
        return upper

    # --8<-- [end:walk-and-split]

    def _new_node(self, parent: Node | None, pages: list[Page], slots: torch.Tensor) -> Node:
        node = Node(self.num_nodes, parent, pages, slots, created=self.time, used=self.time)
        self.num_nodes += 1
        if parent is not None:
            parent.children[pages[0]] = node
        return node

    def _path(self, node: Node) -> list[Node]:
        """From the root's child down to `node`."""
        path = []
        while node is not self.root:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _slots(self, node: Node) -> torch.Tensor:
        return torch.cat([self.root.slots, *(each.slots for each in self._path(node))])

    def _all(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        return self._below(self.root)

    def _below(self, node: Node) -> Iterator[Node]:
        waiting = list(node.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _unlock(self, req: Req) -> None:
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        req.last_node = None
