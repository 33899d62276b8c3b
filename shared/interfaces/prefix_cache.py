"""Contract of a prefix cache: KV of finished and running requests, looked up by their tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from diptych.shared.flags.engine_flags import EvictionPolicyName
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from diptych.shared.types import Req


@dataclass(frozen=True)
class RadixKey:
    """The key of cached KV: tokens within a namespace. Keys of different `extra_key` never match: a text of a
    client, and for a request with a LoRA adapter a tuple of both.

    `is_bigram`: entry i stands for the pair (token i, token i + 1), because a draft model's KV depends on
    the next token: the key of n tokens has n - 1 entries.
    """

    token_ids: list[int]
    extra_key: Hashable = None
    is_bigram: bool = False

    def __len__(self) -> int:
        return max(len(self.token_ids) - 1, 0) if self.is_bigram else len(self.token_ids)


class MatchResult(NamedTuple):
    device_indices: torch.Tensor  # int64 slots of the matched tokens, whole pages
    last_node: Any  # the deepest matched node, to be locked


class InsertResult(NamedTuple):
    prefix_len: int  # tokens that were cached before
    last_node: Any  # the node that holds the key's last token


class CacheNode(NamedTuple):
    """A node as the invariants checker and the drawings read it."""

    node_id: int  # the root's is 0
    parent_id: int
    key: list[Any]  # tokens (or bigrams) of this node's edge
    slots: list[int]  # of the tokens of `key`
    lock_ref: int  # requests that use this node or one below it
    extra_key: Hashable


class CacheWatcher(ABC):
    """Is called at each change of a tree (`WatchablePrefixCache`), so that a match can be kept until it
    changes. A match ends at the end of a node. It changes only when a leaf is added below its last node, or
    when that node is removed."""

    @abstractmethod
    def inserted(self, parent: Any, key: Hashable) -> None:
        """A leaf was added below `parent`. Its edge begins with the page of `key`: (extra_key, token ...)."""

    @abstractmethod
    def split(self, upper: Any, lower: Any) -> None:
        """`lower` was split: the new node `upper` is between it and its former parent."""

    @abstractmethod
    def removed(self, leaf: Any) -> None:
        """A leaf is no longer in the tree."""

    @abstractmethod
    def reset(self) -> None:
        """Only the root is left."""


class PrefixCache(ABC):
    """A tree over token sequences. Each node owns the slots of the tokens on its edge; an edge's length is
    a multiple of page_size. `lock_ref` counts the requests that use a node or a node below it; nodes with
    lock_ref 0 are evictable, the others protected.

    A cache without pools (`allocator` and `req_to_token_pool` None) only matches and inserts: values are
    what the caller passes, and the two request methods must not be called. The tree owns the slots of its
    nodes: a caller of `insert` transfers them, except for the first `prefix_len`.
    """

    page_size: int
    disable: bool = False  # True: the cache never finds a prefix
    is_bigram: bool = False  # requests are keyed by bigrams; the constructor's argument

    @abstractmethod
    def __init__(
        self,
        page_size: int,
        allocator: TokenToKVPoolAllocator | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        eviction_policy: EvictionPolicyName = "lru",
        is_bigram: bool = False,
    ) -> None:
        """Raises `ValueError` for a page_size below 1 or an unknown policy, if the cache uses them."""

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key`, in whole pages. A key shorter than a page, and the empty
        key, match nothing: empty indices and the root.

        Not pure: it updates the access time of the matched part (an unmatched remainder keeps its own) and
        may split a node so that the match ends at the end of a node. A split keeps totals and locks. The
        split node's object stays the *lower* half, so a request that holds it keeps its whole prefix.
        """

    def match_kv(self, key: RadixKey) -> MatchResult:
        """As `match_prefix`, for KV alone: a model with linear attention goes on from a shorter prefix, at
        whose end there is a state."""
        return self.match_prefix(key)

    @abstractmethod
    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        """Add the whole pages of `key`, with their slots `value` (int64, at least as many). Existing
        nodes keep their slots. Priority is raised to the maximum along the path. Inserting a cached key
        creates no node. A key shorter than a page inserts nothing. Values are copied."""

    @abstractmethod
    def inc_lock_ref(self, node: Any) -> None:
        """Lock the path from `node` up to the root (exclusive)."""

    @abstractmethod
    def dec_lock_ref(self, node: Any) -> None:
        """Undo one `inc_lock_ref`. A lock below zero is an `AssertionError`."""

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` tokens, or all that are evictable, and return the number freed. Removes
        whole leaves in the order of the eviction policy, no more than needed, never a locked node, and
        parents when they become leaves.

        The policies. Least first, and then by last access:

        - lru: last access; mru: the same, latest first;
        - fifo: creation; filo: the same, latest first;
        - lfu: hits;
        - slru: nodes of less than 2 hits before all others;
        - priority: priority.

        A hit is a match or an insert through the node. A new node has no hit. The upper half of a split has
        the lower half's hits, creation and priority.
        """

    @abstractmethod
    def discard(self, key: RadixKey, start: int) -> None:
        """Free the unlocked nodes of `key` that begin at entry `start` or later, with everything below them.
        For KV that contains or may contain NaN. (It matches `key`, with all effects of a match.)"""

    @abstractmethod
    def cache_unfinished_req(self, req: Req) -> None:
        """Called when a request's `fill_ids` have KV (after prefill or one chunk): move its whole pages into
        the tree, with the request's priority, so that other requests can share them, and lock them for it.

        Where the tree already had the tokens, the request's row is remapped to the tree's slots *before*
        its duplicates are freed. Updates req.prefix_indices (all of fill_ids' slots, the partial page
        included), req.cache_protected_len, req.last_node and the request's row.
        """

    @abstractmethod
    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """Release a request's memory. The whole pages of the first kv_committed_len tokens go into the tree
        (`is_insert`; False: all slots of the request are freed). Duplicates, the partial page and
        over-allocated slots are freed, each once. The lock and the row are released. Afterwards the request
        owns no memory: req_pool_idx and last_node are None, prefix_indices is empty, and cache_protected_len,
        kv_committed_len and kv_allocated_len are 0."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Tokens in nodes with lock_ref 0."""

    @abstractmethod
    def protected_size(self) -> int:
        """Tokens in nodes with lock_ref > 0."""

    @abstractmethod
    def reset(self) -> None:
        """Remove all nodes without freeing slots: the caller resets the pools too."""

    @abstractmethod
    def node_id(self, node: Any) -> int:
        """The number of a node (`MatchResult.last_node`) in `nodes()`; the root's is 0."""

    @abstractmethod
    def nodes(self) -> Iterator[CacheNode]:
        """All nodes but the root, parents first; children of the root have parent_id 0. (For policies,
        checkers and drawings; may be slow.)"""


class WatchablePrefixCache(PrefixCache):
    """A prefix cache that reports its changes. Optional: users of a cache work without it, more slowly."""

    @abstractmethod
    def watch(self, watcher: CacheWatcher) -> None:
        """Call `watcher` at every later change."""

    @abstractmethod
    def parent(self, node: Any) -> Any:
        """The node above `node`; None for the root."""
