"""Clauses of the radix cache: discarding KV that may contain NaN."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.shared.interfaces import PrefixCache, RadixKey
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, page_sizes
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.contracts.radix_cache.eviction import Tree
from diptych.shared.tools.conformance.contracts.radix_cache.match_and_insert import sizes, slots


def tree_of(impl: type[PrefixCache], *sequences: Sequence[int]) -> Tree:
    tree = Tree(impl)
    for tokens in sequences:
        tree.insert(tokens)
    return tree


@contract(
    "A discarded part is no longer found and its slots are freed; the part before it stays.", page_sizes(1, 4)
)
def discards_the_rest(impl: type[PrefixCache], case: Case) -> None:
    tree = Tree(impl, page_size=case.page_size)
    length = 2 * case.page_size
    tree.insert(range(length))
    kept = tree.match(range(length))
    tree.insert(range(3 * length))
    free = set(tree.allocator.free_slots().tolist())
    bad = set(tree.match(range(3 * length))) - set(kept)
    tree.cache.discard(RadixKey(list(range(3 * length))), length)
    expect_equal("what is found", tree.match(range(3 * length)), kept)
    expect_equal("slots freed", set(tree.allocator.free_slots().tolist()) - free, bad)
    expect_equal("sizes", sizes(tree.cache), (length, 0))


@contract("Nodes below the discarded part are discarded too, and no others.", EXAMPLE)
def discards_what_is_below(impl: type[PrefixCache], case: Case) -> None:
    tree = tree_of(impl, [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 8], [9])
    tree.cache.discard(RadixKey([1, 2, 3, 4]), 2)
    expect_equal("edges", tree.keys(), [[1, 2], [8], [9]])


@contract("A node that begins before `start` stays whole, and so do other namespaces.", EXAMPLE)
def discards_whole_nodes(impl: type[PrefixCache], case: Case) -> None:
    tree = tree_of(impl, [1, 2, 3], [1, 2, 3, 4])
    tree.cache.discard(RadixKey([1, 2, 3, 4], "a"), 0)
    tree.cache.discard(RadixKey([5, 6]), 0)
    tree.cache.discard(RadixKey([]), 0)
    tree.cache.discard(RadixKey([1, 2, 3, 4]), 4)
    expect_equal("edges", tree.keys(), [[1, 2, 3], [4]])
    tree.cache.discard(RadixKey([1, 2, 3, 4]), 2)
    expect_equal("edges", tree.keys(), [[1, 2, 3]])


@contract("Locked nodes stay; unlocked nodes below them are discarded.", EXAMPLE)
def discards_nothing_in_use(impl: type[PrefixCache], case: Case) -> None:
    tree = tree_of(impl, [1], [1, 2], [1, 2, 3], [1, 2, 3, 4])
    node = tree.node([1, 2])
    tree.cache.inc_lock_ref(node)
    tree.cache.discard(RadixKey([1, 2, 3, 4]), 0)
    expect_equal("edges", tree.keys(), [[1], [2]])
    expect_equal("sizes", sizes(tree.cache), (0, 2))
    tree.cache.dec_lock_ref(node)
    tree.cache.discard(RadixKey([1, 2, 3, 4]), 0)
    expect_equal("edges", tree.keys(), [])


@contract("A parent that becomes a leaf by a discard can be evicted.", EXAMPLE)
def evicts_what_is_left(impl: type[PrefixCache], case: Case) -> None:
    tree = tree_of(impl, [1, 2], [1, 2, 3], [4])
    node = tree.node([1, 2, 3])
    tree.cache.inc_lock_ref(node)
    expect_equal("evict(100), all but what is in use", tree.cache.evict(100), 1)
    tree.cache.dec_lock_ref(node)
    tree.cache.discard(RadixKey([1, 2, 3]), 2)
    expect_equal("evict(100)", tree.cache.evict(100), 2)
    expect_equal("free slots", tree.allocator.available_size(), tree.allocator.size)


@contract("A cache without pools discards too.", EXAMPLE)
def discards_without_pools(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(1)
    cache.insert(RadixKey([1, 2, 3]), slots(0, 3))
    cache.discard(RadixKey([1, 2, 3]), 0)
    expect_equal("sizes", sizes(cache), (0, 0))
