"""The optimized radix cache: call for call what the reference answers, and how much each call looks at."""

from __future__ import annotations

import random
from typing import Any, get_args

import numpy as np
import pytest
import torch

from diptych.optimized.array_tree import TreeNode, part_of
from diptych.optimized.radix_cache import RadixCache
from diptych.reference.memory_pool import TokenToKVPoolAllocator
from diptych.reference.radix_cache import RadixCache as ReferenceCache
from diptych.shared.flags.engine_flags import EvictionPolicyName
from diptych.shared.interfaces.prefix_cache import RadixKey
from diptych.shared.tools.conformance.contracts.radix_cache import request_lives
from tests.properties import given, settings, st

POLICIES = get_args(EvictionPolicyName)
BASE = [token % 11 for token in range(700)]  # longer than the pieces that are compared at once


class Pair:
    """Both caches through the same calls, each with an allocator of its own. After each call everything that
    can be seen is compared: results, the tree with its numbers and locks, sizes, the order of free pages."""

    def __init__(self, page_size: int, policy: str, num_pages: int) -> None:
        self.page_size = page_size
        self.allocators = [TokenToKVPoolAllocator(num_pages * page_size, page_size, "cpu") for _ in range(2)]
        self.caches: list[Any] = [
            impl(page_size, allocator, eviction_policy=policy)
            for impl, allocator in zip((RadixCache, ReferenceCache), self.allocators)
        ]
        self.locked: list[tuple[Any, Any]] = []

    def call(self, kind: str, key: RadixKey, number: int) -> None:
        if kind == "unlock" and not self.locked:
            return
        nodes = self.locked.pop(number % len(self.locked)) if kind == "unlock" else (None, None)
        results = [
            getattr(self, f"_{kind}")(cache, allocator, key, number, node)
            for cache, allocator, node in zip(self.caches, self.allocators, nodes)
        ]
        if kind == "lock":
            self.locked.append((results[0], results[1]))
            results = [cache.node_id(node) for cache, node in zip(self.caches, results)]
        assert results[0] == results[1], kind
        seen = [
            (
                list(cache.nodes()),
                cache.evictable_size(),
                cache.protected_size(),
                list(allocator._free_pages),
            )
            for cache, allocator in zip(self.caches, self.allocators)
        ]
        assert seen[0] == seen[1], kind
        heap = self.caches[0].heap
        entries = [node for _, _, node in heap.entries if node.parent is not None]
        assert len(entries) <= (heap._limit if heap.falls_with_use else len(seen[0][0]))

    def _match(self, cache: Any, allocator: Any, key: RadixKey, number: int, node: Any) -> Any:
        found, node = cache.match_prefix(key)
        return found.tolist(), cache.node_id(node)

    def _lock(self, cache: Any, allocator: Any, key: RadixKey, number: int, node: Any) -> Any:
        node = cache.match_prefix(key).last_node
        cache.inc_lock_ref(node)
        return node

    def _unlock(self, cache: Any, allocator: Any, key: RadixKey, number: int, node: Any) -> Any:
        return cache.dec_lock_ref(node)

    def _insert(self, cache: Any, allocator: Any, key: RadixKey, number: int, node: Any) -> Any:
        num_slots = len(key) // self.page_size * self.page_size
        num_evicted = cache.evict(num_slots - allocator.available_size())
        value = allocator.alloc(num_slots)
        if value is None:
            return num_evicted
        prefix_len, node = cache.insert(key, value, number % 4)
        allocator.free(value[:prefix_len])
        return num_evicted, prefix_len, cache.node_id(node)

    def _evict(self, cache: Any, allocator: Any, key: RadixKey, number: int, node: Any) -> Any:
        return cache.evict(number)

    def _discard(self, cache: Any, allocator: Any, key: RadixKey, number: int, node: Any) -> Any:
        cache.discard(key, number)

    def finish(self) -> None:
        while self.locked:
            self.call("unlock", RadixKey([]), 0)
        while self.caches[1].evictable_size():
            self.call("evict", RadixKey([]), 1)


KINDS = [*["insert"] * 6, *["match"] * 4, *["lock"] * 2, *["unlock"] * 2, *["evict"] * 2, "discard"]


def draw_key(rng: random.Random, page_size: int, is_long: bool) -> RadixKey:
    """Draw a key of few different tokens: keys share prefixes and part in all places. With and without
    bigrams."""
    if is_long:
        tokens = BASE[: rng.randint(0, len(BASE))]
        if tokens and rng.random() < 0.7:
            tokens[rng.randrange(len(tokens))] = rng.randint(11, 13)
    else:
        tokens = rng.choices([0, 1], k=rng.randint(0, 4 * page_size + 3))
    return RadixKey(tokens, rng.choice([None, None, "", "a"]), is_bigram=rng.random() < 0.25)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@settings(max_examples=8)
@given(rng=st.randoms(use_true_random=False), is_long=st.booleans(), num_calls=st.integers(1, 150))
def test_any_calls_are_answered_as_by_the_reference(
    page_size: int, policy: str, rng: random.Random, is_long: bool, num_calls: int
) -> None:
    pair = Pair(page_size, policy, rng.choice([12, 60, 2000 // page_size]))
    for _ in range(num_calls):
        key = draw_key(rng, page_size, is_long)
        pair.call(rng.choice(KINDS), key, rng.randint(-1, 4 * page_size))
    pair.finish()


@pytest.mark.parametrize("policy", POLICIES)
def test_many_calls_are_answered_as_by_the_reference(policy: str) -> None:
    rng = random.Random(policy)
    pair = Pair(4, policy, 60)
    for _ in range(1500):
        pair.call(rng.choice(KINDS), draw_key(rng, 4, is_long=False), rng.randint(-1, 20))
    pair.finish()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), num_events=st.integers(1, 120))
def test_any_lives_go_as_with_the_reference(seed: int, num_events: int) -> None:
    case = request_lives.random_lives(seed, num_events)
    traces = [request_lives.Run(impl, case).play() for impl in (RadixCache, ReferenceCache)]
    assert traces[0] == traces[1]


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
