"""A tier below the radix cache: which KV pages are in CPU memory, and loading them back.

The radix tree knows what is on the device. This tier is a table: the digest of all tokens up to the end of a
page -> the page. A prefix is found page by page, until the first digest that is not there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice

import torch

from diptych.shared.interfaces import (
    DiskTier,
    HostPool,
    PrefixCache,
    RadixKey,
    SchedulerFeature,
    TokenToKVPoolAllocator,
)
from diptych.shared.scheduling.disk_pages import DiskPages
from diptych.shared.scheduling.host_pages import MIN_LOADED_TOKENS, HostPages
from diptych.shared.scheduling.pages import evict_for
from diptych.shared.types import Req


class HostCache(HostPages):
    """The pages of CPU memory, below a radix cache and above a disk tier."""

    def __init__(self, pool: HostPool, seed: str, below: DiskTier | None = None) -> None:
        """seed: of all digests; what makes KV of equal tokens differ: model, types, length of a page."""
        super().__init__(pool, seed)
        self.disk = DiskPages(self, below) if below is not None else None
        self.num_loaded_tokens = 0

    def clear(self) -> None:
        if self.disk is not None:
            self.disk.stop()
        super().clear()

    def lets_go(self, digest: str) -> bool:
        return self.disk is None or self.disk.lets_go(digest)

    # --8<-- [start:write-through]
    def store(self, token_ids: Sequence[int], extra_key: Hashable, slots: torch.Tensor) -> None:
        """Copy the whole pages of these tokens, whose KV is in these slots, as far as they
        are new."""
        size = self.pool.page_len
        digests = self.digests(token_ids, extra_key)[: self.pool.num_pages]
        self.use(digests)
        new = {i: digest for i, digest in enumerate(digests) if digest not in self.pages}
        pages = self.take(len(new), keep=set(digests))
        new = dict(islice(new.items(), len(pages)))
        if not new:
            return
        self.pages.update(zip(new.values(), pages))
        self.use(digests)
        self.pool.store(pages, torch.cat([slots[i * size : (i + 1) * size] for i in new]))
        if self.disk is not None:
            self.disk.write(list(new.values()))

    # --8<-- [end:write-through]

    def load(self, req: Req, tree: PrefixCache, allocator: TokenToKVPoolAllocator) -> None:
        """Bring what the tree lacks of a request's prefix, if all of it has room."""
        self.load_kv(self.key_of(req), req, tree, allocator)

    def load_kv(
        self,
        key: RadixKey,
        req: Req,
        tree: PrefixCache,
        allocator: TokenToKVPoolAllocator,
        least: int = MIN_LOADED_TOKENS,
    ) -> None:
        """`load` for this key, if it brings so many tokens."""
        # --8<-- [start:load-back]
        match = tree.match_kv(key)
        start, size = len(match.device_indices), self.pool.page_len
        if len(key) - start < least:
            return
        digests = self.digests(key.token_ids, key.extra_key)
        pages = self._find(digests, first=start // size)
        end = (start // size + len(pages)) * size
        if end - start < least:
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

    def key_of(self, req: Req) -> RadixKey:
        return RadixKey(req.all_ids[: req.max_prefix_len], req.extra_key)

    def _find(self, digests: list[str], first: int) -> list[int]:
        """The pages from number `first` on, up to one that is not there."""
        pages: list[int] = []
        for digest in digests[first : first + self.pool.num_pages]:
            if digest not in self.pages:
                break
            pages.append(self.pages[digest])
        self.use(digests[: first + len(pages)])
        return pages

    def forget(self, key: RadixKey) -> None:
        """KV of this key may hold NaN: its pages leave the tier below, and all pages leave this one, since
        others may have been computed from them."""
        self.clear()
        if self.disk is not None:
            for digest in self.digests(key.token_ids, key.extra_key):
                self.disk.tier.remove(digest)

    def check(self) -> None:
        """Every page has one owner."""
        arriving = self.disk.arriving.values() if self.disk is not None else ()
        owned = sorted([*self.free, *self.pages.values(), *arriving])
        assert owned == list(range(self.pool.num_pages)), f"owners of host pages: {owned}"


class HostLoader(SchedulerFeature):
    """Loads the prefix of each request that joins, as far as the host tier has it and the tree does not."""

    def __init__(self, host: HostCache, tree: PrefixCache, allocator: TokenToKVPoolAllocator) -> None:
        self.host = host
        self.tree = tree
        self.allocator = allocator

    def is_waiting(self, req: Req) -> None:
        if self.host.disk is not None:
            self.host.disk.ask(req, self.tree)

    def may_join(self, req: Req, running: Sequence[Req], new: Sequence[Req]) -> bool:
        disk = self.host.disk
        return disk is None or disk.has_arrived(req, self.tree, may_wait=not running and not new)

    def is_joining(self, req: Req) -> None:
        self.host.load(req, self.tree, self.allocator)

    def have_joined(self, new: Sequence[Req], running: Sequence[Req]) -> None:
        for req in new:
            self.has_left(req)

    def has_left(self, req: Req) -> None:
        if self.host.disk is not None:
            self.host.disk.asked.pop(req.rid, None)

    def engine_ends(self) -> None:
        if self.host.disk is not None:
            self.host.disk.finish_writes()

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
