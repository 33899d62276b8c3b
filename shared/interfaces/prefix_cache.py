"""Contract of a prefix cache: KV of finished and running requests, found again by their tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from shared.types import Req


@dataclass(frozen=True)
class RadixKey:
    """What KV is looked up by: tokens within a namespace. Keys of different `extra_key` never match.

    `is_bigram`: entry i stands for the pair (token i, token i + 1), because a draft model's KV depends on
    the next token: the key of n tokens has n - 1 entries.
    """

    token_ids: list[int]
    extra_key: str | None = None
    is_bigram: bool = False

    def __len__(self) -> int:
        return max(len(self.token_ids) - 1, 0) if self.is_bigram else len(self.token_ids)


class MatchResult(NamedTuple):
    device_indices: torch.Tensor  # int64 slots of the matched tokens, whole pages
    last_node: Any  # the deepest node matched: what to lock


class InsertResult(NamedTuple):
    prefix_len: int  # tokens that were in the cache before
    last_node: Any  # the node that holds the key's last token


class CacheNode(NamedTuple):
    """A node as the invariants checker and the drawings see it."""

    node_id: int
    parent_id: int
    key: list[Any]  # tokens (or bigrams) of this node's edge
    slots: list[int]
    lock_ref: int
    extra_key: str | None


class CacheWatcher(ABC):
    """Is told of a tree's changes, each as soon as it is made: so a match can be kept until it would end
    elsewhere. A match ends on a node's border, so it ends elsewhere only when a leaf is added below its last
    node, or that node is removed."""

    @abstractmethod
    def inserted(self, parent: Any, key: Hashable) -> None:
        """A leaf was added below `parent`. Its edge begins with the page of `key`: (extra_key, token ...)."""

    @abstractmethod
    def split(self, upper: Any, lower: Any) -> None:
        """`lower` was cut in two: `upper`, new, stands between it and what was its parent."""

    @abstractmethod
    def removed(self, leaf: Any) -> None:
        """A leaf is no longer in the tree."""

    @abstractmethod
    def reset(self) -> None:
        """Nothing is left but a root."""


class PrefixCache(ABC):
    """A tree over token sequences. Each node owns the slots of the tokens on its edge; an edge's length is
    a multiple of page_size. `lock_ref` counts the requests that use a node or a node below it; nodes with
    lock_ref 0 are evictable, the others protected.

    A cache built with no pools (`allocator` and `req_to_token_pool` None) only matches and inserts: values
    are then whatever the caller passes, and the two request methods must not be called. Whatever sits in
    the tree owns its slots: a caller of `insert` hands them over, except for the first `prefix_len`.
    """

    page_size: int
    disable: bool = False  # a cache that never finds anything
    is_bigram: bool = False  # requests are kept under bigrams; as the constructor was told

    @abstractmethod
    def __init__(
        self,
        page_size: int,
        allocator: TokenToKVPoolAllocator | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        eviction_policy: Literal["lru", "lfu", "fifo", "priority"] = "lru",
        is_bigram: bool = False,
    ) -> None:
        """A cache that uses them refuses a page_size below 1 and an unknown policy (`ValueError`)."""

    def prefix_key(self, req: Req) -> RadixKey:
        """What a request's prefix is looked up by: entries of at most its first max_prefix_len tokens."""
        num_tokens = req.max_prefix_len + self.is_bigram  # the last pair's second token follows them
        return RadixKey(req.all_ids[:num_tokens], req.extra_key, self.is_bigram)

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key`, in whole pages. A key shorter than a page, and the empty
        key, match nothing: empty indices and the root.

        Not pure: it refreshes the access time of what it matched (only that: an unmatched remainder keeps
        its own) and may split a node so that the match ends on a node's border. A split keeps totals and
        locks, and the split node's object stays the *lower* half: holders of it lose nothing.
        """

    @abstractmethod
    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        """Add the whole pages of `key`, with `value` (int64 slots, at least as many) behind them. Existing
        nodes keep their slots. Priority is raised to the maximum along the path. Inserting what is there
        creates nothing. A key shorter than a page inserts nothing. Values are copied."""

    @abstractmethod
    def inc_lock_ref(self, node: Any) -> None:
        """Lock the path from `node` up to the root (exclusive)."""

    @abstractmethod
    def dec_lock_ref(self, node: Any) -> None:
        """Undo one `inc_lock_ref`. A lock below zero is an `AssertionError`."""

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least so many tokens, if so many are evictable, and return how many were freed. Removes
        whole leaves in the eviction policy's order, no more of them than suffice, never a locked node, and
        parents once they are leaves.

        Order, first evicted first: lru (last access), lfu (hits, last access; a hit is a match or an insert
        through the node), fifo (creation), priority (priority, last access). A new node has no hit; the
        upper half of a split takes over all of these from the whole.
        """

    @abstractmethod
    def discard(self, key: RadixKey, start: int) -> None:
        """Free what the tree holds of `key` from its entry `start` on, with everything below it: nodes that
        begin at `start` or behind it, and that nobody has locked. For KV that is bad, or may be. (To
        find them it matches `key`, with all that a match does.)"""

    @abstractmethod
    def cache_unfinished_req(self, req: Req) -> None:
        """After a request's `fill_ids` have their KV (prefill, or one chunk of it): move the whole pages of
        it into the tree, so that others can share them, and lock them for the request.

        Where the tree already had the tokens, the request's row is remapped to the tree's slots *before*
        its duplicates are freed. Updates req.prefix_indices (all of fill_ids' slots, the partial page
        included), req.cache_protected_len, req.last_node and the request's row.
        """

    @abstractmethod
    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """Release a request's memory. The first kv_committed_len tokens' whole pages go into the tree
        (`is_insert`; False: everything the request owns is freed); duplicates, the partial page and
        over-allocated slots are freed, each once; the lock is dropped; the row is freed. Afterwards
        req.req_pool_idx is None and the request owns nothing."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Tokens in nodes with lock_ref 0."""

    @abstractmethod
    def protected_size(self) -> int:
        """Tokens in nodes with lock_ref > 0."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything without freeing slots: the caller resets the pools too."""

    @abstractmethod
    def node_id(self, node: Any) -> int:
        """The number of a node (`MatchResult.last_node`) in `nodes()`; the root's is 0."""

    def watch(self, watcher: CacheWatcher) -> bool:
        """Tell `watcher` of every change from now on. False, and nothing else, in a cache that tells nobody
        (the default); one that does has `parent` too."""
        return False

    def parent(self, node: Any) -> Any:
        """The node above, None above the root."""
        raise NotImplementedError(f"{type(self).__name__} cannot be watched")

    @abstractmethod
    def nodes(self) -> Iterator[CacheNode]:
        """All nodes but the root, parents first; children of the root have parent_id 0. (For policies,
        checkers and drawings; may be slow.)"""
