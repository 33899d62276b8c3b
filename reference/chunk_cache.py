"""The prefix cache of `--disable-radix-cache`: it finds no prefix and frees KV when its request ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from diptych.shared.flags.engine_flags import EvictionPolicyName
from diptych.shared.interfaces import prefix_cache as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from diptych.shared.interfaces.prefix_cache import CacheNode, InsertResult, MatchResult, RadixKey
from diptych.shared.types import Req


class ChunkCache(interface.PrefixCache):
    """Keeps the slots of a chunked prompt in `prefix_indices`, for its next chunk. There is no tree: the root
    is None, and `insert` takes no slots."""

    disable = True

    def __init__(
        self,
        page_size: int,
        allocator: TokenToKVPoolAllocator | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        eviction_policy: EvictionPolicyName = "lru",
        is_bigram: bool = False,
    ) -> None:
        self.page_size = page_size
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.device = torch.device("cpu") if allocator is None else allocator.slot_device

    def match_prefix(self, key: RadixKey) -> MatchResult:
        return MatchResult(torch.empty(0, dtype=torch.int64, device=self.device), None)

    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        return InsertResult(0, None)

    def inc_lock_ref(self, node: Any) -> None:
        pass

    def dec_lock_ref(self, node: Any) -> None:
        pass

    def evict(self, num_tokens: int) -> int:
        return 0

    def discard(self, key: RadixKey, start: int) -> None:
        pass

    def cache_unfinished_req(self, req: Req) -> None:
        assert self.req_to_token_pool is not None
        assert req.req_pool_idx is not None
        req.prefix_indices = self.req_to_token_pool.read(req.req_pool_idx, 0, len(req.fill_ids))

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        assert self.req_to_token_pool is not None
        assert self.allocator is not None
        assert req.req_pool_idx is not None
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len)
        self.allocator.free(slots)
        self.req_to_token_pool.free([req.req_pool_idx])
        req.req_pool_idx = None
        req.last_node = None
        req.prefix_indices = slots[:0]
        req.cache_protected_len = req.kv_committed_len = req.kv_allocated_len = 0

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def reset(self) -> None:
        pass

    def node_id(self, node: Any) -> int:
        return 0

    def nodes(self) -> Iterator[CacheNode]:
        return iter(())
