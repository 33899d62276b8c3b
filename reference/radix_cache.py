"""The prefix cache as a radix tree of Python objects and token lists; each eviction searches for leaves."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import torch

from diptych.shared.flags.engine_flags import EvictionPolicyName
from diptych.shared.interfaces import prefix_cache as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from diptych.shared.interfaces.prefix_cache import CacheNode, InsertResult, MatchResult, RadixKey
from diptych.shared.scheduling.eviction_order import eviction_order
from diptych.shared.scheduling.pages import round_down_to_page
from diptych.shared.types import Req


@dataclass(eq=False)
class TreeNode:
    """An edge of the tree, and the subtree below it. Times are ticks of the cache's own counter."""

    node_id: int
    parent: TreeNode | None  # None: the root, or a node that was removed
    key: list[Any]  # tokens or bigrams in whole pages; empty for the root
    value: torch.Tensor  # [len(key)] int64, the slots
    extra_key: Hashable
    creation_time: int
    last_access_time: int
    priority: int
    hit_count: int = 0
    lock_ref: int = 0
    children: dict[Hashable, TreeNode] = field(default_factory=dict)  # by the first page of their keys


class RadixCache(interface.PrefixCache):
    def __init__(
        self,
        page_size: int,
        allocator: TokenToKVPoolAllocator | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        eviction_policy: EvictionPolicyName = "lru",
        is_bigram: bool = False,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.eviction_order = eviction_order(eviction_policy)
        self.is_bigram = is_bigram
        self.device = torch.device("cpu") if allocator is None else allocator.slot_device
        self.reset()

    def match_prefix(self, key: RadixKey) -> MatchResult:
        node, _ = self._walk(key)
        return MatchResult(self._path_slots(node), node)

    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        entries = self._whole_pages(key)
        assert len(value) >= len(entries), f"{len(value)} slots for {len(entries)} tokens"
        node, prefix_len = self._walk(key)
        for ancestor in self._path(node):
            ancestor.priority = max(ancestor.priority, priority)
        if prefix_len < len(entries):
            new, slots = entries[prefix_len:], value[prefix_len : len(entries)].to(torch.int64, copy=True)
            leaf = self._new_node(node, new, slots, key.extra_key, self._time, priority)
            node.children[self._child_key(new, 0, key.extra_key)] = leaf
            self._evictable_size += len(slots)
            node = leaf
        return InsertResult(prefix_len, node)

    def inc_lock_ref(self, node: TreeNode) -> None:
        for ancestor in self._path(node):
            if ancestor.lock_ref == 0:
                self._evictable_size -= len(ancestor.value)
                self._protected_size += len(ancestor.value)
            ancestor.lock_ref += 1

    def dec_lock_ref(self, node: TreeNode) -> None:
        for ancestor in self._path(node):
            assert ancestor.lock_ref > 0, f"node {ancestor.node_id} is not locked"
            ancestor.lock_ref -= 1
            if ancestor.lock_ref == 0:
                self._evictable_size += len(ancestor.value)
                self._protected_size -= len(ancestor.value)

    # --8<-- [start:radix-evict]
    def evict(self, num_tokens: int) -> int:
        if num_tokens <= 0:
            return 0
        # The node id breaks ties, because nodes cannot be compared.
        leaves = [
            (self.eviction_order(node), node.node_id, node)
            for node in self._all_nodes()
            if not node.children and node.lock_ref == 0
        ]
        heapq.heapify(leaves)
        num_evicted = 0
        while leaves and num_evicted < num_tokens:
            _, _, node = heapq.heappop(leaves)
            parent = self._parent(node)
            self._remove_leaf(node)
            num_evicted += len(node.value)
            if parent is not self.root and not parent.children and parent.lock_ref == 0:
                heapq.heappush(leaves, (self.eviction_order(parent), parent.node_id, parent))
        return num_evicted
        # --8<-- [end:radix-evict]

    def discard(self, key: RadixKey, start: int) -> None:
        node, end = self._walk(key)
        highest = None  # the highest removed node on the path; all nodes below it are removed too
        for ancestor in self._path(node):
            end -= len(ancestor.key)
            if end < start or ancestor.lock_ref > 0:
                break
            highest = ancestor
        if highest is not None:
            for leaf in reversed(list(self._nodes_from(highest))):
                self._remove_leaf(leaf)

    def cache_unfinished_req(self, req: Req) -> None:
        num_owned, num_filled = req.cache_protected_len, len(req.fill_ids)
        assert num_filled <= req.kv_allocated_len, f"{num_filled} tokens, {req.kv_allocated_len} slots"
        assert self.req_to_token_pool is not None
        assert self.allocator is not None
        assert req.req_pool_idx is not None
        # --8<-- [start:cache-unfinished-req]
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, num_filled)
        key = RadixKey(req.key_ids[:num_filled], req.extra_key, self.is_bigram)
        prefix_len, node = self.insert(key, slots, req.priority)
        shared = self._path_slots(node)
        # Another request cached [num_owned, prefix_len) first. The row must name the tree's
        # slots before the request's own slots are freed and may be overwritten.
        self.req_to_token_pool.write(req.req_pool_idx, num_owned, shared[num_owned:prefix_len])
        self.allocator.free(slots[num_owned:prefix_len])
        self.inc_lock_ref(node)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        req.last_node = node
        req.cache_protected_len = len(shared)
        req.prefix_indices = torch.cat([shared, slots[len(shared) :]])
        # --8<-- [end:cache-unfinished-req]

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        assert self.req_to_token_pool is not None
        assert self.allocator is not None
        assert req.req_pool_idx is not None
        num_owned = req.cache_protected_len
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len)
        if is_insert:
            key = RadixKey(req.key_ids[: req.kv_committed_len], req.extra_key, self.is_bigram)
            prefix_len, _ = self.insert(key, slots, req.priority)
            num_cached = len(self._whole_pages(key))
            # Duplicates; then the partial page, and slots that were allocated and never committed.
            unused = torch.cat([slots[num_owned:prefix_len], slots[max(num_cached, num_owned) :]])
        else:
            unused = slots[num_owned:]
        self.allocator.free(unused)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        self.req_to_token_pool.free([req.req_pool_idx])
        req.req_pool_idx = req.last_node = None
        req.prefix_indices = slots[:0]
        req.cache_protected_len = req.kv_committed_len = req.kv_allocated_len = 0

    def evictable_size(self) -> int:
        return self._evictable_size

    def protected_size(self) -> int:
        return self._protected_size

    def reset(self) -> None:
        self._num_nodes = 0
        self._time = 0
        self._evictable_size = 0
        self._protected_size = 0
        no_slots = torch.empty(0, dtype=torch.int64, device=self.device)
        self.root = self._new_node(None, [], no_slots, None, creation_time=0, priority=0)

    def node_id(self, node: TreeNode) -> int:
        return node.node_id

    def nodes(self) -> Iterator[CacheNode]:
        for node in self._all_nodes():
            key, slots = list(node.key), node.value.tolist()
            yield CacheNode(
                node.node_id, self._parent(node).node_id, key, slots, node.lock_ref, node.extra_key
            )

    def _whole_pages(self, key: RadixKey) -> list[Any]:
        """The key's tokens or bigrams, cut to whole pages."""
        entries = list(pairwise(key.token_ids)) if key.is_bigram else key.token_ids
        return entries[: round_down_to_page(len(entries), self.page_size)]

    def _child_key(self, entries: list[Any], start: int, extra_key: Hashable) -> Hashable:
        """The page at `start`: the key of a child in its parent."""
        return extra_key, *entries[start : start + self.page_size]

    # --8<-- [start:radix-walk]
    def _walk(self, key: RadixKey) -> tuple[TreeNode, int]:
        """Descend from the root as far as whole pages of `key` match. A node that they
        match in part is split. Returns the deepest node and the matched length. Every
        node on the path gets a hit."""
        entries = self._whole_pages(key)
        self._time += 1
        node, start = self.root, 0
        while start < len(entries):
            child = node.children.get(self._child_key(entries, start, key.extra_key))
            if child is None:
                break
            matched_len = self._matched_len(entries, start, child.key)
            if matched_len < len(child.key):
                child = self._split(child, matched_len)
            child.last_access_time = self._time
            child.hit_count += 1
            node, start = child, start + matched_len
        return node, start
        # --8<-- [end:radix-walk]

    def _matched_len(self, entries: list[Any], start: int, key: list[Any]) -> int:
        """Length of the common prefix of entries[start:] and `key`, in whole pages."""
        n, longest = 0, min(len(entries) - start, len(key))
        while n < longest and entries[start + n] == key[n]:
            n += 1
        return round_down_to_page(n, self.page_size)

    # --8<-- [start:radix-split]
    def _split(self, child: TreeNode, upper_len: int) -> TreeNode:
        """Cut a node in two and return the new upper half. `child` stays the lower
        half, so that requests that lock it keep their whole path. Both halves have the
        node's age, hits, locks and priority."""
        key, value = child.key[:upper_len], child.value[:upper_len]
        upper = self._new_node(child.parent, key, value, child.extra_key, child.creation_time, child.priority)
        upper.hit_count = child.hit_count
        upper.lock_ref = child.lock_ref
        self._parent(upper).children[self._child_key(upper.key, 0, upper.extra_key)] = upper
        child.parent = upper
        child.key, child.value = child.key[upper_len:], child.value[upper_len:]
        upper.children[self._child_key(child.key, 0, child.extra_key)] = child
        return upper
        # --8<-- [end:radix-split]

    def _remove_leaf(self, leaf: TreeNode) -> None:
        assert not leaf.children
        assert leaf.lock_ref == 0
        del self._parent(leaf).children[self._child_key(leaf.key, 0, leaf.extra_key)]
        leaf.parent = None
        self._evictable_size -= len(leaf.value)
        if self.allocator is not None:
            self.allocator.free(leaf.value)

    def _new_node(
        self,
        parent: TreeNode | None,
        key: list[Any],
        value: torch.Tensor,
        extra_key: Hashable,
        creation_time: int,
        priority: int,
    ) -> TreeNode:
        self._num_nodes += 1
        return TreeNode(
            self._num_nodes - 1, parent, key, value, extra_key,
            creation_time, last_access_time=creation_time, priority=priority,
        )  # fmt: skip

    def _parent(self, node: TreeNode) -> TreeNode:
        assert node.parent is not None, f"node {node.node_id} is no longer in the tree"
        return node.parent

    def _path(self, node: TreeNode) -> Iterator[TreeNode]:
        """The nodes from `node` up to the root, without the root."""
        while node is not self.root:
            assert node.parent is not None, f"node {node.node_id} is no longer in the tree"
            yield node
            node = node.parent

    def _path_slots(self, node: TreeNode) -> torch.Tensor:
        values = [ancestor.value for ancestor in self._path(node)]
        return torch.cat([self.root.value, *values[::-1]])

    def _all_nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root, parents first."""
        return islice(self._nodes_from(self.root), 1, None)

    def _nodes_from(self, node: TreeNode) -> Iterator[TreeNode]:
        """`node` and all nodes below it, parents first."""
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
