"""Stage 05, the radix cache: complete the functions that raise NotImplementedError.

diptych course grade 05     # in the folder of `diptych course start`
diptych check --stage 05 my_cache.py

The contract of each method is in shared/interfaces/prefix_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
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

ORDERS = {  # the node with the smallest value is evicted first
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
    pages: list[Page]  # of the edge from the parent to this node
    slots: torch.Tensor  # int64 [len(pages) * page_size]
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

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The slots of the longest cached prefix, and its deepest node."""
        raise NotImplementedError("TODO match: what the tree has of this key")

    def _walk(self, pages: list[Page]) -> Node:
        """The deepest node on the path of `pages`. Sets `used` of each node on the way to the time of this
        walk, and counts a hit. A node that they leave in the middle is split first (`_split`)."""
        self.time += 1
        raise NotImplementedError("TODO match: how far can you go down?")

    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        """The length that was cached before, and the node that holds the last token. A new leaf has
        `priority`, and the nodes above it are raised to it."""
        if not self._pages(key):
            return InsertResult(0, self.root)
        raise NotImplementedError("TODO insert: what is missing below the end of the walk")

    def _split(self, lower: Node, count: int) -> Node:
        """Cut `lower` after `count` pages. Returns the new upper half, which is between `lower` and its
        parent."""
        raise NotImplementedError("TODO split: draw both nodes, and who holds them, before and after")

    def evict(self, num_tokens: int) -> int:
        """Remove leaves until `num_tokens` tokens are freed, or no leaf can go. Returns the tokens freed. A
        cache without pools has no allocator, and nothing to free."""
        raise NotImplementedError("TODO evict: which node can go, and which goes first?")

    def inc_lock_ref(self, node: Node) -> None:
        raise NotImplementedError("TODO lock: what does a request read that holds this node?")

    def dec_lock_ref(self, node: Node) -> None:
        raise NotImplementedError("TODO lock: the opposite")

    def discard(self, key: RadixKey, start: int) -> None:
        """Remove the nodes on the path of `key` that begin at entry `start` or later and have no lock, with
        all nodes below them."""
        raise NotImplementedError("TODO discard: what must leave the tree, and what is below it?")

    def cache_unfinished_req(self, req: Req) -> None:
        """The first len(req.fill_ids) tokens of the request have KV: the same number of `req.key_ids`, of
        `req.extra_key`, is their key."""
        raise NotImplementedError("TODO requests: who owns each slot, before and after?")

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """The request ends: all its slots go to the tree or are freed. Its fields say that it owns nothing:
        the contract lists them."""
        raise NotImplementedError("TODO requests: nothing may be left behind")

    # What follows is complete.

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
        """The whole pages of a key; the rest of its tokens is dropped."""
        entries = list(pairwise(key.token_ids)) if key.is_bigram else key.token_ids
        starts = range(0, len(entries) - self.page_size + 1, self.page_size)
        return [(key.extra_key, *entries[start : start + self.page_size]) for start in starts]

    def _new_node(self, parent: Node | None, pages: list[Page], slots: torch.Tensor) -> Node:
        """A node below `parent`, entered in its `children`."""
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
        """int64: the slots of the path to `node`."""
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
