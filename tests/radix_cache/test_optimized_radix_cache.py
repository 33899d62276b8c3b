"""The optimized radix cache beyond its contract: how much each call looks at, and what is kept in memory."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from diptych.optimized.array_tree import TreeNode, part_of
from diptych.optimized.radix_cache import RadixCache
from diptych.shared.flags.engine_flags import EvictionPolicyName
from diptych.shared.interfaces.prefix_cache import RadixKey
from diptych.shared.tools.conformance.contracts.radix_cache import request_lives, sequences

POLICIES = get_args(EvictionPolicyName)


class WithHeap(sequences.Run):
    """After each call the heap has no more entries than the tree has nodes, or than its limit."""

    def _check(self) -> None:
        super()._check()
        heap, num_nodes = self.cache.heap, sum(1 for _ in self.cache.nodes())
        entries = [node for _, _, node in heap.entries if node.parent is not None]
        assert len(entries) <= (heap._limit if heap.falls_with_use else num_nodes)


@pytest.mark.parametrize("seed", range(14))
def test_the_heap_stays_small(seed: int) -> None:
    WithHeap(RadixCache, sequences.random_calls(seed, 300)).play()


def full_cache(num_leaves: int, length: int = 8, policy: str = "lru") -> RadixCache:
    """Leaves that part at their first token."""
    cache = RadixCache(1, eviction_policy=policy)
    for i in range(num_leaves):
        cache.insert(RadixKey([i, *range(length - 1)]), torch.arange(length))
    return cache


@pytest.mark.parametrize("policy", POLICIES)
def test_evicting_looks_at_few_leaves_of_many(policy: str) -> None:
    cache = full_cache(3000, policy=policy)
    order, looked_at = cache.heap.order, []
    cache.heap.order = lambda node: looked_at.append(node) or order(node)
    for _ in range(10):
        assert cache.evict(1) == 8
    assert len(looked_at) == 10


def test_entries_brought_up_to_date_are_paid_for_by_uses() -> None:
    cache = full_cache(1000)
    for i in range(500):
        cache.match_prefix(RadixKey([i, *range(7)]))
    order, looked_at = cache.heap.order, []
    cache.heap.order = lambda node: looked_at.append(node) or order(node)
    assert cache.evict(1000 * 8) == 8000
    assert len(looked_at) == 1500


class Watched(list):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        piece = super().__getitem__(index)
        self.num_read += len(piece)
        return piece


@pytest.mark.parametrize("matched_len", [0, 4, 400, 4000])
def test_a_match_reads_no_more_of_the_key_than_it_matches(matched_len: int) -> None:
    cache = RadixCache(4)
    cache.insert(RadixKey(list(range(50_000))), torch.arange(50_000))
    key = Watched([*range(matched_len), *[-1] * 50_000])
    assert len(cache.match_prefix(RadixKey(key)).device_indices) == matched_len
    assert key.num_read <= 2 * matched_len + 300


def test_the_tree_keeps_no_memory_of_what_is_gone() -> None:
    """Prefixes of long evicted sequences would else keep all of their tokens and slots."""
    cache = RadixCache(1)
    for i in range(20):
        cache.insert(RadixKey([i] * 1000), torch.arange(1000))
        for length in (10, 300, 700):
            cache.match_prefix(RadixKey([i] * length))
    for num_kept in (20_000, 14_000, 6000, 200):
        cache.evict(cache.evictable_size() - num_kept)
        kept: dict[int, int] = {}
        stack = [cache.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            storage = node.value.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // 8
            tokens = node.key if node.key.base is None else node.key.base
            assert len(tokens) <= 2 * max(node.num_slots, 1)
        assert sum(kept.values()) <= 2 * cache.evictable_size()


def test_a_path_that_is_not_the_requests_is_named() -> None:
    world = request_lives.CacheWorld(RadixCache, 1)
    req = world.prefill(range(6))
    req.cache_protected_len -= 1
    with pytest.raises(AssertionError, match="protects 5 tokens, its path has 6"):
        world.cache_unfinished(req)


@pytest.mark.parametrize("is_bigram", [False, True])
def test_a_part_is_a_view_unless_it_would_keep_twice_its_size_alive(is_bigram: bool) -> None:
    key, value = np.arange(8 + is_bigram), torch.arange(8)
    node = TreeNode(1, None, key, value, 8, None, is_bigram, 0, 0, 0)
    for start, end, is_view in ((0, 3, False), (0, 4, False), (0, 5, True), (2, 7, True), (0, 8, True)):
        tokens, slots = part_of(node, start, end)
        assert tokens.tolist() == list(range(start, end + is_bigram))
        assert slots.tolist() == list(range(start, end))
        assert np.shares_memory(tokens, key) == is_view
        assert (slots.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()) == is_view
