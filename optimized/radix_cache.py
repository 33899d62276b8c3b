"""The prefix cache as a radix tree: tokens as int64 arrays, leaves in a heap that is put right when evicting.

Differs from reference: no call walks the tree. A match costs what it matched: the key is turned into arrays
piece by piece, only as far as it goes on agreeing, and compared by whole arrays. Eviction keeps a heap
between calls (optimized/eviction_heap.py), and frees the slots of one call at once. A request that comes back
is not compared again with the path that it locks. Slots stay on their device throughout.

Assumes tokens that fit int64, and that a request's tokens do not change while it lives. Tokens take 8 bytes
instead of a Python object each, and the garbage collector does not visit them. It loses where nodes are few
and short: an array costs about a microsecond before it compares anything. And the first eviction after many
leaves were used brings all of their entries up to date: what it takes longer, each use has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from optimized.eviction_heap import EvictionHeap
from shared.interfaces import prefix_cache as interface
from shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from shared.interfaces.prefix_cache import CacheNode, CacheWatcher, InsertResult, MatchResult, RadixKey
from shared.types import Req


@dataclass(eq=False, slots=True)
class TreeNode:
    """An edge of the tree and the subtree below it. Times are ticks of the cache's own counter."""

    node_id: int
    parent: TreeNode | None  # None: the root, or a node that was evicted
    tokens: npt.NDArray[np.int64]  # [num_slots], of bigrams one more: that of the last pair's second token
    value: torch.Tensor  # [num_slots] int64
    num_slots: int  # whole pages; the root's are none
    extra_key: str | None
    is_bigram: bool
    creation_time: int
    last_access_time: int
    priority: int
    hit_count: int = 0
    lock_ref: int = 0
    is_queued: bool = False  # the heap has an entry for it, up to date or not
    children: dict[Hashable, TreeNode] = field(default_factory=dict)


# None of these ever becomes smaller for a node: EvictionHeap relies on it.
EVICTION_ORDER: dict[str, Callable[[TreeNode], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_access_time,),
    "lfu": lambda node: (node.hit_count, node.last_access_time),
    "fifo": lambda node: (node.creation_time,),
    "priority": lambda node: (node.priority, node.last_access_time),
}

# The first piece of a key that is compared with an edge; each further one is twice as long.
COMPARE_LEN = 256


class RadixCache(interface.PrefixCache):
    def __init__(
        self,
        page_size: int,
        allocator: TokenToKVPoolAllocator | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        eviction_policy: Literal["lru", "lfu", "fifo", "priority"] = "lru",
        is_bigram: bool = False,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if eviction_policy not in EVICTION_ORDER:
            raise ValueError(f"eviction_policy {eviction_policy!r} is none of {', '.join(EVICTION_ORDER)}")
        self.page_size = page_size
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.heap = EvictionHeap(EVICTION_ORDER[eviction_policy])
        self.is_bigram = is_bigram
        self.device = torch.device("cpu") if allocator is None else allocator.slot_device
        self._watchers: list[CacheWatcher] = []
        self.reset()

    def match_prefix(self, key: RadixKey) -> MatchResult:
        node, _ = self._walk(key, self.root, 0)
        return MatchResult(self._path_slots(node), node)

    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        return self._insert_below(self.root, 0, key, value, priority)

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
        self.heap.add(node)  # those above have children

    def evict(self, num_tokens: int) -> int:
        num_evicted, values = 0, []
        while num_evicted < num_tokens and (node := self.heap.pop()) is not None:
            parent = node.parent
            self._remove_leaf(node)
            values.append(node.value)
            num_evicted += node.num_slots
            self.heap.add(parent)
        self._free(values)
        return num_evicted

    def discard(self, key: RadixKey, start: int) -> None:
        node, end = self._walk(key, self.root, 0)
        highest = None
        for ancestor in self._path(node):
            end -= ancestor.num_slots
            if end < start or ancestor.lock_ref > 0:
                break
            highest = ancestor
        if highest is not None:
            parent, gone = highest.parent, list(self._nodes_from(highest))[::-1]
            for leaf in gone:
                self._remove_leaf(leaf)
            self.heap.add(parent)
            self._free([leaf.value for leaf in gone])

    def cache_unfinished_req(self, req: Req) -> None:
        num_owned, num_filled = req.cache_protected_len, len(req.fill_ids)
        assert num_filled <= req.kv_allocated_len, f"{num_filled} tokens, {req.kv_allocated_len} slots"
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, num_filled)
        key = RadixKey(req.fill_ids, req.extra_key, self.is_bigram)
        prefix_len, node = self._insert_of(req, key, slots)
        shared = self._path_slots(node)
        # [num_owned, prefix_len) was in the tree already (another request was faster). The row must
        # point to the tree's slots before its own are freed and may be overwritten.
        self.req_to_token_pool.write(req.req_pool_idx, num_owned, shared[num_owned:prefix_len])
        self.allocator.free(slots[num_owned:prefix_len])
        self.inc_lock_ref(node)
        self._unlock(req)
        req.last_node = node
        req.cache_protected_len = len(shared)
        req.prefix_indices = torch.cat([shared, slots[len(shared) :]])

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        num_owned = req.cache_protected_len
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len)
        if is_insert:
            key = RadixKey(req.all_ids[: req.kv_committed_len], req.extra_key, self.is_bigram)
            prefix_len, _ = self._insert_of(req, key, slots)
            # Duplicates, then the partial page with what was allocated and never committed.
            num_cached = self._num_whole(key)
            unused = torch.cat([slots[num_owned:prefix_len], slots[max(num_cached, num_owned) :]])
        else:
            unused = slots[num_owned:]
        self.allocator.free(unused)
        self._unlock(req)
        self.req_to_token_pool.free([req.req_pool_idx])
        req.req_pool_idx = None
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
        no_tokens = np.empty(0, np.int64)
        self.root = self._new_node(
            None, no_tokens, self._no_slots(), None, False, creation_time=0, priority=0
        )
        for watcher in self._watchers:
            watcher.reset()

    def node_id(self, node: TreeNode) -> int:
        return node.node_id

    def watch(self, watcher: CacheWatcher) -> bool:
        self._watchers.append(watcher)
        return True

    def parent(self, node: TreeNode) -> TreeNode | None:
        return node.parent

    def nodes(self) -> Iterator[CacheNode]:
        for node in islice(self._nodes_from(self.root), 1, None):
            tokens = node.tokens.tolist()
            key = list(pairwise(tokens)) if node.is_bigram else tokens
            slots = node.value.tolist()
            yield CacheNode(node.node_id, node.parent.node_id, key, slots, node.lock_ref, node.extra_key)

    def _num_whole(self, key: RadixKey) -> int:
        """The key's entries (tokens or bigrams) in whole pages."""
        return len(key) // self.page_size * self.page_size

    def _child_key(self, tokens: list[int], extra_key: str | None) -> Hashable:
        """`tokens`: those of the first page, of bigrams one more. So bigrams and tokens never meet."""
        return extra_key, *tokens

    def _walk(self, key: RadixKey, node: TreeNode, start: int) -> tuple[TreeNode, int]:
        """Descend from `node`, whose path is known to hold the key's first `start` entries, as far as whole
        pages lead, splitting the node in which they part from the tree or end. Returns the deepest node and
        the length matched; every node on the way is a hit."""
        self._time += 1
        for ancestor in self._path(node):
            self._touch(ancestor)
        num_entries = self._num_whole(key)
        page_len = self.page_size + key.is_bigram
        while start < num_entries:
            page = key.token_ids[start : start + page_len]
            child = node.children.get(self._child_key(page, key.extra_key))
            if child is None:
                break
            matched_len = self._matched_len(key, start, num_entries, child)
            if matched_len < child.num_slots:
                child = self._split(child, matched_len)
            self._touch(child)
            node, start = child, start + matched_len
        return node, start

    def _touch(self, node: TreeNode) -> None:
        node.last_access_time = self._time
        node.hit_count += 1

    def _matched_len(self, key: RadixKey, start: int, end: int, child: TreeNode) -> int:
        """How many of the key's entries from `start` to `end` stand in `child`, in whole pages. Its first
        page does: the child was found by it."""
        num_tokens = min(end - start, child.num_slots) + key.is_bigram
        n, piece_len = self.page_size + key.is_bigram, COMPARE_LEN
        while n < num_tokens:
            piece = _as_array(key.token_ids[start + n : start + min(n + piece_len, num_tokens)])
            stored = child.tokens[n : n + len(piece)]
            if piece.tobytes() != stored.tobytes():  # quicker than element by element, and mostly equal
                n += int((piece != stored).argmax())
                break
            n += len(piece)
            piece_len *= 2
        n -= key.is_bigram
        return n - n % self.page_size

    def _split(self, child: TreeNode, upper_len: int) -> TreeNode:
        """Cut a node in two and return the new upper half, untouched yet. `child` stays the lower one:
        requests that hold it still hold all of their path. Both were stored, hit and locked alike so far.
        An entry of the heap stays `child`'s; the upper half has a child and needs none."""
        tokens, value = self._part(child, 0, upper_len)
        upper = self._new_node(
            child.parent,
            tokens,
            value,
            child.extra_key,
            child.is_bigram,
            creation_time=child.creation_time,
            priority=child.priority,
        )
        upper.hit_count = child.hit_count
        upper.lock_ref = child.lock_ref
        upper.parent.children[self._key_of(upper)] = upper
        child.parent = upper
        child.tokens, child.value = self._part(child, upper_len, child.num_slots)
        child.num_slots -= upper_len
        upper.children[self._key_of(child)] = child
        for watcher in self._watchers:
            watcher.split(upper, child)
        return upper

    def _part(self, node: TreeNode, start: int, end: int) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Tokens and slots of a part of a node: views, unless they would keep memory of twice their size.
        So no more than that is held for the whole tree, and what is copied was matched before: a part
        that is left is copied once in halving."""
        tokens, value = node.tokens[start : end + node.is_bigram], node.value[start:end]
        owner = node.tokens if node.tokens.base is None else node.tokens.base
        return (tokens.copy(), value.clone()) if 2 * (end - start) <= len(owner) else (tokens, value)

    def _key_of(self, node: TreeNode) -> Hashable:
        """What a node is found by among its parent's children."""
        page = node.tokens[: self.page_size + node.is_bigram].tolist()
        return self._child_key(page, node.extra_key)

    def _insert_of(self, req: Req, key: RadixKey, slots: torch.Tensor) -> InsertResult:
        """`insert`, beginning where the path ends that the request locks."""
        node, start = req.last_node, req.cache_protected_len
        if node is None or start > self._num_whole(key):
            node, start = self.root, 0
        path_len = sum(ancestor.num_slots for ancestor in self._path(node))
        assert path_len == start, f"{req.rid} protects {start} tokens, its path has {path_len}"
        return self._insert_below(node, start, key, slots, req.priority)

    def _insert_below(
        self, node: TreeNode, start: int, key: RadixKey, value: torch.Tensor, priority: int
    ) -> InsertResult:
        num_entries = self._num_whole(key)
        assert len(value) >= num_entries, f"{len(value)} slots for {num_entries} tokens"
        node, prefix_len = self._walk(key, node, start)
        for ancestor in self._path(node):
            ancestor.priority = max(ancestor.priority, priority)
        if prefix_len < num_entries:
            leaf = self._new_node(
                node,
                _as_array(key.token_ids[prefix_len : num_entries + key.is_bigram]),
                value[prefix_len:num_entries].to(torch.int64, copy=True),
                key.extra_key,
                key.is_bigram,
                creation_time=self._time,
                priority=priority,
            )
            child_key = self._key_of(leaf)
            node.children[child_key] = leaf
            self._evictable_size += leaf.num_slots
            self.heap.add(leaf)
            for watcher in self._watchers:
                watcher.inserted(node, child_key)
            node = leaf
        return InsertResult(prefix_len, node)

    def _remove_leaf(self, leaf: TreeNode) -> None:
        assert not leaf.children
        assert leaf.lock_ref == 0
        del leaf.parent.children[self._key_of(leaf)]
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
        tokens: npt.NDArray[np.int64],
        value: torch.Tensor,
        extra_key: str | None,
        is_bigram: bool,
        creation_time: int,
        priority: int,
    ) -> TreeNode:
        self._num_nodes += 1
        return TreeNode(
            node_id=self._num_nodes - 1,
            parent=parent,
            tokens=tokens,
            value=value,
            num_slots=len(value),
            extra_key=extra_key,
            is_bigram=is_bigram,
            creation_time=creation_time,
            last_access_time=creation_time,
            priority=priority,
        )

    def _unlock(self, req: Req) -> None:
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        req.last_node = None

    def _path(self, node: TreeNode) -> Iterator[TreeNode]:
        """From `node` up to the root, without the root."""
        while node is not self.root:
            assert node.parent is not None, f"node {node.node_id} is no longer in the tree"
            yield node
            node = node.parent

    def _nodes_from(self, node: TreeNode) -> Iterator[TreeNode]:
        """A node and those below it, parents first."""
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _path_slots(self, node: TreeNode) -> torch.Tensor:
        values = [ancestor.value for ancestor in self._path(node)]
        return torch.cat(values[::-1]) if values else self._no_slots()

    def _no_slots(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.device)


def _as_array(tokens: list[int]) -> npt.NDArray[np.int64]:
    """Twice as fast as numpy.array for lists."""
    return np.fromiter(tokens, np.int64, len(tokens))
