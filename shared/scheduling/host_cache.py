"""A tier below the radix cache: which KV pages are in CPU memory, and loading them back.

The radix tree knows what is on the device. This tier is a table: the digest of all tokens up to the end of a
page -> the page. A prefix is found page by page, until the first digest that is not there.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import torch

from diptych.shared.interfaces import (
    HostPool,
    PrefixCache,
    RadixKey,
    SchedulerFeature,
    TokenToKVPoolAllocator,
)
from diptych.shared.scheduling.pages import evict_for
from diptych.shared.types import Req

MIN_LOADED_TOKENS = 10
"""Fewer tokens are computed again as fast as they are loaded."""


class NextTier(Protocol):
    """What is below CPU memory: pages by the same digests."""

    def write(self, key: str, data: bytes) -> None: ...
    def read(self, key: str) -> bytes | None: ...
    def remove(self, key: str) -> None: ...


class HostCache:
    """Every page is free, or has one digest. The pages of a prefix are used from its end on: a page is not
    given up before those behind it."""

    def __init__(self, pool: HostPool, seed: str, below: NextTier | None = None) -> None:
        """seed: of all digests; what makes KV of equal tokens differ: model, types, length of a page."""
        self.pool = pool
        self.seed = seed
        self.below = below
        self.num_loaded_tokens = 0
        self.clear()

    def clear(self) -> None:
        self.pages: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.free = list(range(self.pool.num_pages))[::-1]

    # --8<-- [start:page-digests]
    def digests(self, token_ids: Sequence[int], extra_key: Hashable) -> list[str]:
        """One for each whole page: of the page's tokens and all before them, in their
        namespace."""
        size = self.pool.page_len
        tokens = np.asarray(token_ids, np.int64)
        digest = hashlib.sha256(repr((self.seed, extra_key)).encode())
        found = []
        for start in range(0, len(tokens) - size + 1, size):
            digest.update(tokens[start : start + size].tobytes())
            found.append(digest.hexdigest())
        return found

    # --8<-- [end:page-digests]

    # --8<-- [start:write-through]
    def store(self, token_ids: Sequence[int], extra_key: Hashable, slots: torch.Tensor) -> None:
        """Copy the whole pages of these tokens, whose KV is in these slots, as far as they
        are new."""
        size = self.pool.page_len
        digests = self.digests(token_ids, extra_key)[: self.pool.num_pages]
        self._use(digests)
        new = [i for i, digest in enumerate(digests) if digest not in self.pages]
        if not new:
            return
        pages = [self._take(digests[i]) for i in new]
        self._use(digests)
        self.pool.store(pages, torch.cat([slots[i * size : (i + 1) * size] for i in new]))
        if self.below is not None:
            for i, page in zip(new, pages):
                self.below.write(digests[i], self.pool.page_bytes(page))

    # --8<-- [end:write-through]

    # --8<-- [start:load-back]
    def load(self, req: Req, tree: PrefixCache, allocator: TokenToKVPoolAllocator) -> None:
        """Bring what the tree lacks of a request's prefix, if all of it has room."""
        key = RadixKey(req.all_ids[: req.max_prefix_len], req.extra_key)
        match = tree.match_prefix(key)
        start, size = len(match.device_indices), self.pool.page_len
        if len(key) - start < MIN_LOADED_TOKENS:
            return
        digests = self.digests(key.token_ids, key.extra_key)
        pages = self._find(digests, first=start // size)
        end = (start // size + len(pages)) * size
        if end - start < MIN_LOADED_TOKENS:
            return
        tree.inc_lock_ref(match.last_node)  # it must not make room for the rest
        num_free = allocator.available_size() + tree.evictable_size()
        slots = None
        if num_free > req.num_tokens - start + allocator.page_size:
            evict_for(end - start, tree, allocator)
            slots = allocator.alloc_extend([start], [end], [-1])
        tree.dec_lock_ref(match.last_node)
        if slots is not None:
            self.pool.load(pages, slots, start % size)
            loaded = RadixKey(key.token_ids[:end], key.extra_key)
            tree.insert(loaded, torch.cat([match.device_indices, slots]), req.priority)
            self.num_loaded_tokens += end - start

    # --8<-- [end:load-back]

    def _find(self, digests: list[str], first: int) -> list[int]:
        """The pages from number `first` on, up to one that no tier has."""
        pages: list[int] = []
        for digest in digests[first : first + self.pool.num_pages]:
            if digest not in self.pages:
                data = self.below.read(digest) if self.below is not None else None
                if data is None:
                    break
                self.pool.set_page_bytes(self._take(digest), data)
            self.pages.move_to_end(digest)
            pages.append(self.pages[digest])
        self._use(digests[: first + len(pages)])
        return pages

    def _take(self, digest: str) -> int:
        """A page for this digest: a free one, or the one that was not used for the longest time."""
        page = self.free.pop() if self.free else self.pages.popitem(last=False)[1]
        self.pages[digest] = page
        return page

    def _use(self, digests: Sequence[str]) -> None:
        for digest in reversed(digests):  # the first page is the most recent one
            if digest in self.pages:
                self.pages.move_to_end(digest)

    def forget(self, key: RadixKey) -> None:
        """KV of this key may hold NaN: its pages leave the tier below, and all pages leave this one, since
        others may have been computed from them."""
        if self.below is not None:
            for digest in self.digests(key.token_ids, key.extra_key):
                self.below.remove(digest)
        self.clear()

    def check(self) -> None:
        """Every page has one owner."""
        owned = sorted([*self.free, *self.pages.values()])
        assert owned == list(range(self.pool.num_pages)), f"owners of host pages: {owned}"


class HostLoader(SchedulerFeature):
    """Loads the prefix of each request that joins, as far as the host tier has it and the tree does not."""

    def __init__(self, host: HostCache, tree: PrefixCache, allocator: TokenToKVPoolAllocator) -> None:
        self.host = host
        self.tree = tree
        self.allocator = allocator

    def is_joining(self, req: Req) -> None:
        self.host.load(req, self.tree, self.allocator)

    def check(self) -> None:
        self.host.check()


def tiered(cache_class: type[PrefixCache], tier: HostCache) -> type[PrefixCache]:
    """The class of a cache with this tier below it: what goes into the tree goes to CPU memory as well."""

    class TieredRadixCache(cache_class):  # type: ignore[misc, valid-type]
        host = tier

        def cache_unfinished_req(self, req: Req) -> None:
            super().cache_unfinished_req(req)
            tier.store(req.fill_ids, req.extra_key, req.prefix_indices)

        def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
            if is_insert:
                num_tokens = req.kv_committed_len
                slots = self.req_to_token_pool.read(req.req_pool_idx, 0, num_tokens)
                tier.store(req.all_ids[:num_tokens], req.extra_key, slots)
            super().cache_finished_req(req, is_insert)

        def discard(self, key: RadixKey, start: int) -> None:
            tier.forget(key)
            super().discard(key, start)

        def reset(self) -> None:
            super().reset()
            if self.allocator is not None:  # a policy makes caches of this class without pools
                tier.clear()

    return TieredRadixCache
