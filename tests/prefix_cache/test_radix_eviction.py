"""RadixCache.evict: what goes first, what never goes, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shared.interfaces.prefix_cache import RadixKey

from .harness import IMPLS, World, make_cache


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


class Tree:
    """A cache whose slots come from an allocator, so that freed slots can be told."""

    def __init__(self, impl: str, eviction_policy: str = "lru", page_size: int = 1) -> None:
        self.world = World(impl, page_size, num_pages=64, eviction_policy=eviction_policy)
        self.cache, self.allocator = self.world.cache, self.world.allocator

    def insert(self, tokens: Sequence[int], priority: int = 0) -> list[int]:
        """The slots that back the whole of `tokens` now."""
        value = self.allocator.alloc(len(tokens))
        result = self.cache.insert(RadixKey(list(tokens)), value, priority)
        self.allocator.free(value[: result.prefix_len])
        return self.match(tokens)

    def match(self, tokens: Sequence[int]) -> list[int]:
        return self.cache.match_prefix(RadixKey(list(tokens))).device_indices.tolist()

    def node(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(RadixKey(list(tokens))).last_node

    def keys(self) -> list[list[int]]:
        return sorted(node.key for node in self.cache.nodes())

    def eviction_order(self) -> list[list[int]]:
        """The edges in the order in which they go, one leaf at a time."""
        order = []
        while before := self.keys():
            self.cache.evict(1)
            after = self.keys()
            (gone,) = [key for key in before if key not in after]
            order.append(gone)
        return order


@pytest.mark.parametrize("page_size", [1, 4])
def test_evicted_slots_go_back_to_the_allocator(impl: str, page_size: int) -> None:
    tree = Tree(impl, page_size=page_size)
    slots = tree.insert(range(4 * page_size))
    free = set(tree.allocator.free_slots().tolist())
    assert tree.cache.evict(1) == 4 * page_size
    assert set(tree.allocator.free_slots().tolist()) == free | set(slots)
    assert tree.match(range(4 * page_size)) == []
    assert tree.cache.evictable_size() == 0


def test_whole_leaves_go_and_the_number_freed_is_returned(impl: str) -> None:
    tree = Tree(impl)
    tree.insert([1, 2, 3])
    tree.insert([4, 5])
    tree.insert([6])
    assert tree.cache.evict(4) == 5  # 3 do not suffice, and 2 of them do not go alone
    assert tree.keys() == [[6]]
    assert tree.cache.evict(100) == 1  # all there is
    assert tree.cache.evict(1) == 0


@pytest.mark.parametrize("num_tokens", [0, -3])
def test_evicting_nothing_evicts_nothing(impl: str, num_tokens: int) -> None:
    tree = Tree(impl)
    tree.insert([1])
    assert tree.cache.evict(num_tokens) == 0
    assert tree.keys() == [[1]]


def test_parents_go_once_they_are_leaves(impl: str) -> None:
    tree = Tree(impl)
    tree.insert([1, 2, 3])
    tree.insert([1, 2, 4])
    assert tree.eviction_order() == [[3], [4], [1, 2]]


def test_locked_nodes_and_what_is_above_them_never_go(impl: str) -> None:
    tree = Tree(impl)
    kept = tree.insert([1, 2, 3])
    tree.insert([1, 2, 4])
    tree.insert([1, 2, 3, 5])
    tree.insert([8, 9])
    tree.cache.inc_lock_ref(tree.node([1, 2, 3]))
    assert tree.cache.evict(100) == 4
    assert tree.match([1, 2, 3, 5]) == kept
    assert (tree.cache.evictable_size(), tree.cache.protected_size()) == (0, 3)
    tree.cache.dec_lock_ref(tree.node([1, 2, 3]))
    assert tree.cache.evict(100) == 3
    assert tree.allocator.available_size() == tree.allocator.size


def test_a_cache_without_pools_evicts_too(impl: str) -> None:
    cache = make_cache(impl)
    cache.insert(RadixKey([1, 2, 3]), torch.arange(3))
    assert cache.evict(1) == 3
    assert cache.evictable_size() == 0


def test_lru_goes_by_the_last_access(impl: str) -> None:
    tree = Tree(impl)
    for token in (1, 2, 3, 4):
        tree.insert([token])
    tree.match([2, 99])
    tree.insert([1])
    assert tree.eviction_order() == [[3], [4], [2], [1]]


def test_an_unmatched_remainder_keeps_its_timestamp(impl: str) -> None:
    """CASES A4 (SG#24892): matching the first half of a node must not make the second half look recent."""
    tree = Tree(impl)
    tree.insert([1, 2, 3, 4])
    tree.insert([5, 6])
    assert len(tree.match([1, 2, 99])) == 2
    assert tree.eviction_order() == [[3, 4], [5, 6], [1, 2]]


def test_a_remainder_that_an_insert_cuts_off_keeps_its_timestamp(impl: str) -> None:
    tree = Tree(impl)
    tree.insert([1, 2, 3, 4])
    tree.insert([5, 6])
    tree.insert([1, 2, 7])
    assert tree.eviction_order() == [[3, 4], [5, 6], [7], [1, 2]]


def test_lfu_counts_matches_and_inserts(impl: str) -> None:
    tree = Tree(impl, "lfu")
    for token in (1, 2, 3):
        tree.insert([token])  # a match each, made by `insert` above
    tree.match([1])
    tree.match([1])
    tree.insert([2])  # two hits at once: the insert and the match
    tree.match([2])
    tree.match([3])
    assert tree.eviction_order() == [[3], [1], [2]]


def test_lfu_breaks_ties_by_the_last_access(impl: str) -> None:
    tree = Tree(impl, "lfu")
    for token in (1, 2, 3):
        tree.insert([token])
    for token in (3, 1, 2):
        tree.match([token])
    assert tree.eviction_order() == [[3], [1], [2]]


def test_lfu_halves_of_a_split_start_from_the_hits_of_the_whole(impl: str) -> None:
    tree = Tree(impl, "lfu")
    tree.insert([1, 2, 3])  # one hit
    for _ in range(3):
        tree.match([1, 2, 3])
    tree.insert([4])
    tree.match([4])
    tree.match([1])  # splits: [2, 3] has had four hits, [1] five, [4] two
    tree.cache.evict(1)
    assert tree.keys() == [[1], [2, 3]]
    tree.insert([5])
    for _ in range(3):
        tree.match([5])  # as often as [2, 3], and later
    assert tree.eviction_order() == [[2, 3], [5], [1]]


def test_fifo_goes_by_creation_whatever_was_used_since(impl: str) -> None:
    tree = Tree(impl, "fifo")
    tree.insert([1, 2])
    tree.insert([3])
    tree.insert([4])
    for _ in range(3):
        tree.match([1])  # splits [1, 2]: both halves are as old as the whole was
    tree.insert([5])
    assert tree.eviction_order() == [[2], [1], [3], [4], [5]]


def test_priority_goes_least_important_first_then_by_the_last_access(impl: str) -> None:
    tree = Tree(impl, "priority")
    for token, priority in ((1, 5), (2, 0), (3, 5), (4, -2)):
        tree.insert([token], priority)
    tree.match([1])
    assert tree.eviction_order() == [[4], [2], [3], [1]]


def test_priority_is_raised_and_never_lowered(impl: str) -> None:
    tree = Tree(impl, "priority")
    for token, priority in ((1, 0), (2, 3), (3, 4)):
        tree.insert([token], priority)
    tree.insert([1], priority=7)
    tree.insert([3], priority=1)
    assert tree.eviction_order() == [[2], [3], [1]]


def test_priority_is_raised_along_the_path(impl: str) -> None:
    tree = Tree(impl, "priority")
    tree.insert([1, 2, 3], priority=0)
    tree.insert([1, 9], priority=7)  # [1] is worth 7 now, [2, 3] still 0
    tree.insert([8], priority=7)
    tree.match([1])
    assert tree.eviction_order() == [[2, 3], [9], [8], [1]]


def test_halves_of_a_split_are_as_important_as_the_whole(impl: str) -> None:
    tree = Tree(impl, "priority")
    tree.insert([1, 2, 3], priority=5)
    tree.insert([8], priority=5)
    tree.match([1])
    assert tree.eviction_order() == [[2, 3], [8], [1]]
