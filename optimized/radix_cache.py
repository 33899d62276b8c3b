"""The prefix cache as a radix tree whose operations cost time in proportion to the match, not to the tree.

Differs from reference: tokens are arrays (optimized/array_tree.py). The leaves stay in a heap between
evictions (optimized/eviction_heap.py). A request that caches its next chunk is not compared again with the
path that it locks. Watchers are called at each change of the tree. Assumes tokens that fit int64. It loses
where nodes are few and short: an array takes about a microsecond before it compares anything. The first
eviction after many leaves were used takes longer: it corrects their entries.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice, pairwise

import numpy as np
import torch

from diptych.optimized.array_tree import (
    Array,
    TreeNode,
    as_array,
    child_key,
    child_key_of,
    matched_len,
    part_of,
)
from diptych.optimized.eviction_heap import EvictionHeap
from diptych.shared.flags.engine_flags import EvictionPolicyName
from diptych.shared.interfaces import prefix_cache as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from diptych.shared.interfaces.prefix_cache import (
    CacheNode,
    CacheWatcher,
    InsertResult,
    MatchResult,
    RadixKey,
)
from diptych.shared.scheduling.eviction_order import eviction_order
from diptych.shared.scheduling.pages import round_down_to_page
from diptych.shared.types import Req


class RadixCache(interface.WatchablePrefixCache):
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
        order = eviction_order(eviction_policy)
        self.heap = EvictionHeap(order, falls_with_use=eviction_policy == "mru")
        self.is_bigram = is_bigram
        self.device = torch.device("cpu") if allocator is None else allocator.slot_device
        self._watchers: list[CacheWatcher] = []
        self.reset()

    def match_prefix(self, key: RadixKey) -> MatchResult:
        node, _ = self._walk(key, self.root, 0)
        return MatchResult(self._path_slots(node), node)

    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        return self._insert_below(self.root, 0, key, value, priority)

    def _insert_below(
        self, node: TreeNode, start: int, key: RadixKey, value: torch.Tensor, priority: int
    ) -> InsertResult:
        """`insert`, starting at `node`, whose path has the key's first `start` entries."""
        num_cached = round_down_to_page(len(key), self.page_size)
        assert len(value) >= num_cached, f"{len(value)} slots for {num_cached} tokens"
        node, prefix_len = self._walk(key, node, start)
        for ancestor in self._path(node):
            ancestor.priority = max(ancestor.priority, priority)
        if prefix_len < num_cached:
            node = self._add_leaf(node, key, prefix_len, value[prefix_len:num_cached], priority)
        return InsertResult(prefix_len, node)

    def _insert_of(self, req: Req, key: RadixKey, slots: torch.Tensor) -> InsertResult:
        """`insert`, starting at the end of the path that the request locks."""
        node, start = req.last_node, req.cache_protected_len
        if node is None or start > round_down_to_page(len(key), self.page_size):
            node, start = self.root, 0
        path_len = sum(ancestor.num_slots for ancestor in self._path(node))
        assert path_len == start, f"{req.rid} protects {start} tokens, its path has {path_len}"
        return self._insert_below(node, start, key, slots, req.priority)

    def inc_lock_ref(self, node: TreeNode) -> None:
        for ancestor in self._path(node):
            if ancestor.lock_ref == 0:
                self._evictable_size -= ancestor.num_slots
                self._protected_size += ancestor.num_slots
            ancestor.lock_ref += 1

    def dec_lock_ref(self, node: TreeNode) -> None:
        for ancestor in self._path(node):
            assert ancestor.lock_ref > 0, f"node {ancestor.node_id} is not locked"
            ancestor.lock_ref -= 1
            if ancestor.lock_ref == 0:
                self._evictable_size += ancestor.num_slots
                self._protected_size -= ancestor.num_slots
        self.heap.add(node)  # its ancestors have children

    # --8<-- [start:radix-evict]
    def evict(self, num_tokens: int) -> int:
        num_evicted = 0
        values: list[torch.Tensor] = []
        while num_evicted < num_tokens and (node := self.heap.pop()) is not None:
            parent = self._parent(node)
            self._remove_leaf(node)
            values.append(node.value)
            num_evicted += node.num_slots
            self.heap.add(parent)
        self._free(values)
        return num_evicted

    # --8<-- [end:radix-evict]

    def discard(self, key: RadixKey, start: int) -> None:
        node, end = self._walk(key, self.root, 0)
        highest = None  # the highest removed node on the path; all nodes below it are removed too
        for ancestor in self._path(node):
            end -= ancestor.num_slots
            if end < start or ancestor.lock_ref > 0:
                break
            highest = ancestor
        if highest is not None:
            parent, gone = self._parent(highest), list(self._nodes_from(highest))[::-1]
            for leaf in gone:
                self._remove_leaf(leaf)
            self.heap.add(parent)
            self._free([leaf.value for leaf in gone])

    def cache_unfinished_req(self, req: Req) -> None:
        num_owned, num_filled = req.cache_protected_len, len(req.fill_ids)
        assert num_filled <= req.kv_allocated_len, f"{num_filled} tokens, {req.kv_allocated_len} slots"
        assert self.req_to_token_pool is not None
        assert self.allocator is not None
        assert req.req_pool_idx is not None
        # --8<-- [start:cache-unfinished-req]
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, num_filled)
        key = RadixKey(req.fill_key_ids, req.extra_key, self.is_bigram)
        prefix_len, node = self._insert_of(req, key, slots)
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
            prefix_len, _ = self._insert_of(req, key, slots)
            num_cached = round_down_to_page(len(key), self.page_size)
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
        self.heap.clear()
        no_key, no_slots = np.empty(0, np.int64), torch.empty(0, dtype=torch.int64, device=self.device)
        self.root = self._new_node(None, no_key, no_slots, None, False, creation_time=0, priority=0)
        for watcher in self._watchers:
            watcher.reset()

    def node_id(self, node: TreeNode) -> int:
        return node.node_id

    def nodes(self) -> Iterator[CacheNode]:
        for node in self._all_nodes():
            tokens, slots = node.key.tolist(), node.value.tolist()
            key = list(pairwise(tokens)) if node.is_bigram else tokens
            yield CacheNode(
                node.node_id, self._parent(node).node_id, key, slots, node.lock_ref, node.extra_key
            )

    def watch(self, watcher: CacheWatcher) -> None:
        self._watchers.append(watcher)

    def parent(self, node: TreeNode) -> TreeNode | None:
        return node.parent

    # --8<-- [start:radix-walk]
    def _walk(self, key: RadixKey, node: TreeNode, start: int) -> tuple[TreeNode, int]:
        """Descend from `node`, whose path holds the key's first `start` entries, as far
        as whole pages of `key` match. A node that they match in part is split. Returns
        the deepest node and the matched length. Every node on the path gets a hit."""
        self._time += 1
        for ancestor in self._path(node):
            self._touch(ancestor)
        end, page_len = round_down_to_page(len(key), self.page_size), self.page_size + key.is_bigram
        while start < end:
            child = node.children.get(child_key(key.token_ids[start : start + page_len], key.extra_key))
            if child is None:
                break
            num_matched = matched_len(key, start, end, child, self.page_size)
            if num_matched < child.num_slots:
                child = self._split(child, num_matched)
            self._touch(child)
            node, start = child, start + num_matched
        return node, start

    # --8<-- [end:radix-walk]

    def _touch(self, node: TreeNode) -> None:
        node.last_access_time = self._time
        node.hit_count += 1
        self.heap.used(node)

    # --8<-- [start:radix-split]
    def _split(self, child: TreeNode, upper_len: int) -> TreeNode:
        """Cut a node in two and return the new upper half. `child` stays the lower
        half, so that requests that lock it keep their whole path. Both halves have the
        node's age, hits, locks and priority. The heap's entry stays that of `child`;
        the upper half has a child and needs none."""
        key, value = part_of(child, 0, upper_len)
        upper = self._new_node(
            child.parent, key, value, child.extra_key, child.is_bigram, child.creation_time, child.priority
        )
        upper.hit_count = child.hit_count
        upper.lock_ref = child.lock_ref
        self._parent(upper).children[child_key_of(upper, self.page_size)] = upper
        child.parent = upper
        child.key, child.value = part_of(child, upper_len, child.num_slots)
        child.num_slots -= upper_len
        upper.children[child_key_of(child, self.page_size)] = child
        for watcher in self._watchers:
            watcher.split(upper, child)
        return upper

    # --8<-- [end:radix-split]

    def _add_leaf(
        self, parent: TreeNode, key: RadixKey, start: int, value: torch.Tensor, priority: int
    ) -> TreeNode:
        """A leaf with the key's entries from `start` on, and a copy of their slots `value`."""
        tokens = as_array(key.token_ids[start : start + len(value) + key.is_bigram])
        value = value.to(torch.int64, copy=True)
        leaf = self._new_node(parent, tokens, value, key.extra_key, key.is_bigram, self._time, priority)
        page = child_key_of(leaf, self.page_size)
        parent.children[page] = leaf
        self._evictable_size += leaf.num_slots
        self.heap.add(leaf)
        for watcher in self._watchers:
            watcher.inserted(parent, page)
        return leaf

    def _remove_leaf(self, leaf: TreeNode) -> None:
        assert not leaf.children
        assert leaf.lock_ref == 0
        del self._parent(leaf).children[child_key_of(leaf, self.page_size)]
        leaf.parent = None
        self._evictable_size -= leaf.num_slots
        for watcher in self._watchers:
            watcher.removed(leaf)

    def _free(self, values: list[torch.Tensor]) -> None:
        if values and self.allocator is not None:
            self.allocator.free(torch.cat(values))

    def _new_node(
        self,
        parent: TreeNode | None,
        key: Array,
        value: torch.Tensor,
        extra_key: Hashable,
        is_bigram: bool,
        creation_time: int,
        priority: int,
    ) -> TreeNode:
        self._num_nodes += 1
        return TreeNode(
            self._num_nodes - 1, parent, key, value, len(value), extra_key, is_bigram,
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
