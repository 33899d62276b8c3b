"""Clauses of the radix cache: splits, locks and inspection."""

from __future__ import annotations

from diptych.shared.interfaces import CacheNode, PrefixCache, RadixKey
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.tools.conformance.contracts.radix_cache.match_and_insert import (
    PAGE_SIZES,
    insert,
    match,
    sizes,
    slots,
)
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld


def edges(cache: PrefixCache) -> list[tuple[list[int], int]]:
    """(tokens, lock_ref) of every edge."""
    return sorted((node.key, node.lock_ref) for node in cache.nodes())


def by_id(cache: PrefixCache) -> dict[int, CacheNode]:
    return {node.node_id: node for node in cache.nodes()}


@contract(
    "A split keeps totals and locks. The split node's object stays the lower half.",
    PAGE_SIZES,
)
def split_keeps_the_holder(impl: type[PrefixCache], case: Case) -> None:
    p = case.page_size
    cache = impl(p)
    insert(cache, range(6 * p), 100)
    holder = cache.match_prefix(RadixKey(list(range(6 * p)))).last_node
    holder_id = cache.node_id(holder)
    cache.inc_lock_ref(holder)
    cache.inc_lock_ref(holder)
    upper_keys, lower_keys = list(range(4 * p)), list(range(4 * p, 6 * p))
    upper = cache.match_prefix(RadixKey(upper_keys)).last_node
    expect_equal("the holder's number", cache.node_id(holder), holder_id)
    expect_true("the upper half is another node", cache.node_id(upper) != holder_id)
    expect_equal("edges and their locks", edges(cache), [(upper_keys, 2), (lower_keys, 2)])
    lower = by_id(cache)[holder_id]
    expect_equal("the holder's tokens", lower.key, lower_keys)
    expect_equal("the holder's slots", lower.slots, [100 + i for i in lower_keys])
    expect_equal("the holder's parent", lower.parent_id, cache.node_id(upper))
    above = by_id(cache)[cache.node_id(upper)]
    expect_equal(
        "the upper half's slots and parent",
        (above.slots, above.parent_id),
        ([100 + i for i in upper_keys], 0),
    )
    expect_equal("sizes", sizes(cache), (0, 6 * p))
    cache.dec_lock_ref(holder)
    expect_equal("after one unlock", edges(cache), [(upper_keys, 1), (lower_keys, 1)])
    cache.dec_lock_ref(holder)
    expect_equal("sizes after the other", sizes(cache), (6 * p, 0))


@contract("A split of an unlocked node locks nothing, and its halves can be locked separately.", PAGE_SIZES)
def split_of_an_unlocked_node(impl: type[PrefixCache], case: Case) -> None:
    p = case.page_size
    cache = impl(p)
    insert(cache, range(4 * p), 100)
    upper = cache.match_prefix(RadixKey(list(range(p)))).last_node
    expect_equal("sizes after the split", sizes(cache), (4 * p, 0))
    cache.inc_lock_ref(upper)
    expect_equal("sizes with the upper half locked", sizes(cache), (3 * p, p))
    expect_equal("slots", match(cache, range(4 * p)), list(range(100, 100 + 4 * p)))


@contract("Locking the node of a match locks the matched part and no more.", PAGE_SIZES)
def match_locks_what_it_matched(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(case.page_size)
    insert(cache, range(4 * case.page_size), 100)
    cache.inc_lock_ref(cache.match_prefix(RadixKey([*range(3 * case.page_size), 99])).last_node)
    expect_equal("sizes", sizes(cache), (case.page_size, 3 * case.page_size))


@contract("Sizes stay right when a locked node is split, extended and unlocked.", EXAMPLE)
def sizes_after_a_split(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(1)
    insert(cache, range(8), 100)
    whole = cache.match_prefix(RadixKey(list(range(8)))).last_node
    cache.inc_lock_ref(whole)
    half = cache.match_prefix(RadixKey(list(range(4)))).last_node
    cache.inc_lock_ref(half)
    expect_equal("prefix_len of a branch", insert(cache, [0, 1, 77], 200), 2)
    expect_equal("sizes", sizes(cache), (1, 8))
    cache.dec_lock_ref(whole)
    expect_equal("sizes without the longer lock", sizes(cache), (5, 4))
    cache.dec_lock_ref(half)
    expect_equal("sizes without locks", sizes(cache), (9, 0))
    expect_equal("locks left", [node.lock_ref for node in cache.nodes() if node.lock_ref], [])


@contract("A lock of a long key holds the nodes of the shorter keys that it continues.", PAGE_SIZES)
def long_keys_hold_short_ones(impl: type[PrefixCache], case: Case) -> None:
    p = case.page_size
    cache = impl(p)
    insert(cache, range(p), 100)
    insert(cache, range(3 * p), 100)
    node = cache.match_prefix(RadixKey(list(range(3 * p)))).last_node
    first, rest = list(range(p)), list(range(p, 3 * p))
    cache.inc_lock_ref(node)
    expect_equal("edges and their locks", edges(cache), [(first, 1), (rest, 1)])
    expect_equal("sizes", sizes(cache), (0, 3 * p))
    cache.dec_lock_ref(node)
    expect_equal("edges after the unlock", edges(cache), [(first, 0), (rest, 0)])
    expect_equal("sizes after the unlock", sizes(cache), (3 * p, 0))


@contract("A lock applies to the path from its node up to the root.", EXAMPLE)
def locks_count_along_the_path(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(1)
    for tokens, start in (([1, 2, 3], 10), ([1, 2, 4], 20), ([1, 5], 30)):
        insert(cache, tokens, start)
    first = cache.match_prefix(RadixKey([1, 2, 3])).last_node
    second = cache.match_prefix(RadixKey([1, 2, 4])).last_node
    cache.inc_lock_ref(first)
    cache.inc_lock_ref(second)
    expect_equal("edges with two locks", edges(cache), [([1], 2), ([2], 2), ([3], 1), ([4], 1), ([5], 0)])
    expect_equal("sizes", sizes(cache), (1, 4))
    cache.dec_lock_ref(first)
    expect_equal("edges with one lock", edges(cache), [([1], 1), ([2], 1), ([3], 0), ([4], 1), ([5], 0)])
    expect_equal("sizes with one lock", sizes(cache), (2, 3))


@contract("The root is not part of a path: locking and unlocking it changes nothing.", EXAMPLE)
def root_lock(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(1)
    insert(cache, [1, 2], 10)
    root = cache.match_prefix(RadixKey([9])).last_node
    expect_equal("the root's number", cache.node_id(root), 0)
    cache.inc_lock_ref(root)
    cache.dec_lock_ref(root)
    cache.dec_lock_ref(root)
    expect_equal("sizes", sizes(cache), (2, 0))


@contract("A lock below zero is an AssertionError.", EXAMPLE)
def lock_below_zero(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(1)
    node = cache.insert(RadixKey([1, 2]), slots(10, 2)).last_node
    expect_raises("dec_lock_ref() of a node never locked", AssertionError, cache.dec_lock_ref, node)
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    expect_raises("dec_lock_ref() once too often", AssertionError, cache.dec_lock_ref, node)


@contract("nodes() lists each node once, parents first, under the number that node_id returns.", EXAMPLE)
def nodes_parents_first(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(2)
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6, 7, 8], [9, 9]):
        insert(cache, tokens, 10 * len(tokens))
    seen = {0}
    for node in cache.nodes():
        expect_true(
            f"the parent of node {node.node_id} comes before it", node.parent_id in seen, node.parent_id
        )
        expect_true(f"node {node.node_id} comes once", node.node_id not in seen)
        expect_equal(f"slots of node {node.node_id}", len(node.slots), len(node.key))
        seen.add(node.node_id)
    expect_equal(
        "edges", sorted(node.key for node in cache.nodes()), [[1, 2], [3, 4], [5, 6], [7, 8], [9, 9]]
    )
    result = cache.match_prefix(RadixKey([1, 2, 5, 6]))
    expect_equal("the matched node's tokens", by_id(cache)[cache.node_id(result.last_node)].key, [5, 6])


@contract("reset removes all nodes and frees no slot.", EXAMPLE)
def reset_forgets(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, 2, num_pages=4)
    cache, allocator = world.cache, world.allocator
    node = cache.insert(RadixKey([1, 2, 3, 4]), allocator.alloc(4)).last_node
    cache.inc_lock_ref(node)
    cache.reset()
    expect_equal("sizes", sizes(cache), (0, 0))
    expect_equal("nodes", list(cache.nodes()), [])
    expect_equal("match", match(cache, [1, 2, 3, 4]), [])
    expect_equal("free slots", allocator.available_size(), 4)
    allocator.clear()
    cache.insert(RadixKey([1, 2, 3, 4]), allocator.alloc(4))
    expect_equal("evict() afterwards", cache.evict(4), 4)
    expect_equal("free slots at the end", allocator.available_size(), 8)
