"""Planted bugs in what the prefix caches do with a request's memory."""

from __future__ import annotations

from diptych.reference.chunk_cache import ChunkCache
from diptych.reference.radix_cache import RadixCache
from diptych.shared.interfaces.prefix_cache import RadixKey
from diptych.shared.types import Req
from tests.conformance.mutants.mutant import bugs_in, mutant_of


@mutant_of("radix_cache")
class FreesBeforeRemapping(RadixCache):
    """Duplicates are freed while the request's row still names them."""

    def cache_unfinished_req(self, req: Req) -> None:
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, len(req.fill_ids))
        key = RadixKey(req.fill_ids, req.extra_key, self.is_bigram)
        found = len(self.match_prefix(key).device_indices)
        self.allocator.free(slots[req.cache_protected_len : found])
        free, self.allocator.free = self.allocator.free, lambda slots: None
        try:
            super().cache_unfinished_req(req)
        finally:
            self.allocator.free = free


@mutant_of("radix_cache")
class NeverRemaps(RadixCache):
    """The row goes on naming the duplicates that were freed."""

    def cache_unfinished_req(self, req: Req) -> None:
        row = self.req_to_token_pool.read(req.req_pool_idx, 0, len(req.fill_ids))
        super().cache_unfinished_req(req)
        self.req_to_token_pool.write(req.req_pool_idx, 0, row)


@mutant_of("radix_cache")
class KeepsTheOldLock(RadixCache):
    """After a chunk the node of the chunk before stays locked."""

    def cache_unfinished_req(self, req: Req) -> None:
        old, req.last_node = req.last_node, None
        super().cache_unfinished_req(req)
        assert old is not None or req.last_node is not None


@mutant_of("radix_cache")
class ProtectsThePartialPage(RadixCache):
    """cache_protected_len is taken for the length of prefix_indices: the partial page has no owner."""

    def cache_unfinished_req(self, req: Req) -> None:
        super().cache_unfinished_req(req)
        req.cache_protected_len = len(req.prefix_indices)


@mutant_of("radix_cache")
class DropsThePartialPage(RadixCache):
    """prefix_indices ends with the last whole page: the next chunk computes the partial page again."""

    def cache_unfinished_req(self, req: Req) -> None:
        super().cache_unfinished_req(req)
        req.prefix_indices = req.prefix_indices[: req.cache_protected_len]


@mutant_of("radix_cache")
class FreesTheTailTwice(RadixCache):
    """The partial page of a finished request is freed once more, quietly: another's page may go."""

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        tail = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len)[-1:]
        has_tail = req.kv_allocated_len % self.page_size != 0
        super().cache_finished_req(req, is_insert)
        if has_tail:
            self.allocator.free(tail)


@mutant_of("radix_cache")
class LeaksWhatWasNotCommitted(RadixCache):
    """Slots allocated for tokens that were never committed are not freed."""

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        req.kv_allocated_len = req.kv_committed_len
        super().cache_finished_req(req, is_insert)


@mutant_of("radix_cache")
class CachesTheNewestToken(RadixCache):
    """A finished request's last sampled token is cached though it has no KV."""

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        if is_insert and req.num_tokens > req.kv_committed_len and req.kv_allocated_len % self.page_size:
            req.kv_committed_len = req.kv_allocated_len = req.kv_allocated_len + 1
        super().cache_finished_req(req, is_insert)


@mutant_of("radix_cache")
class InsertsAfterAll(RadixCache):
    """is_insert=False inserts too: what was aborted is found by others."""

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        super().cache_finished_req(req)


@mutant_of("radix_cache")
class KeepsTheLockAtTheEnd(RadixCache):
    """A finished request's prefix stays locked for ever."""

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        req.last_node = None
        super().cache_finished_req(req, is_insert)


@mutant_of("radix_cache")
class KeepsTheRow(RadixCache):
    """A finished request's row of req_to_token is not freed."""

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        rows = self.req_to_token_pool.alloc(1)
        own = req.req_pool_idx
        slots = self.req_to_token_pool.read(own, 0, req.kv_allocated_len)
        if rows is not None:
            self.req_to_token_pool.write(rows[0], 0, slots)
            req.req_pool_idx = rows[0]
        super().cache_finished_req(req, is_insert)


@mutant_of("chunk_cache")
class ChunkLeaksWhatWasNotCommitted(ChunkCache):
    """Slots allocated for tokens that were never committed are not freed."""

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        req.kv_allocated_len = req.kv_committed_len
        super().cache_finished_req(req, is_insert)


@mutant_of("chunk_cache")
class ChunkIsProtected(ChunkCache):
    """A chunk counts as the cache's, so that it is not freed at the end."""

    def cache_unfinished_req(self, req: Req) -> None:
        super().cache_unfinished_req(req)
        req.cache_protected_len = len(req.prefix_indices)


@mutant_of("chunk_cache")
class ChunkForgotten(ChunkCache):
    """The next chunk begins at the start again."""

    def cache_unfinished_req(self, req: Req) -> None:
        req.prefix_indices = req.prefix_indices[:0]


chunk_bug = bugs_in("chunk_cache", "reference.chunk_cache:ChunkCache", folder="reference.")
# fmt: off
chunk_bug("SaysThatItEvicts", "evict gives the number that it was asked for.",
          ("chunk_cache", "def evict(self, num_tokens: int) -> int:\n        return 0",
           "def evict(self, num_tokens: int) -> int:\n        return num_tokens"))
chunk_bug("KeepsRowsOfTheFinished", "A finished request's row is not freed.",
          ("chunk_cache", "self.req_to_token_pool.free([req.req_pool_idx])", "pass"))
chunk_bug("KeepsTheFirstPage", "A finished request's first page is not freed.",
          ("chunk_cache", "self.allocator.free(slots)", "self.allocator.free(slots[self.page_size :])"))
