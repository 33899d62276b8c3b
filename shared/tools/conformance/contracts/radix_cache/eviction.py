"""Clauses of the radix cache: eviction order, locked nodes, freed slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from diptych.shared.flags.engine_flags import EvictionPolicyName
from diptych.shared.interfaces import PrefixCache, RadixKey
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, page_sizes, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises
from diptych.shared.tools.conformance.contracts.radix_cache.match_and_insert import sizes, slots
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld

POLICIES = get_args(EvictionPolicyName)


class Tree:
    """A cache whose slots come from an allocator, which records freed slots."""

    def __init__(self, impl: type[PrefixCache], eviction_policy: str = "lru", page_size: int = 1) -> None:
        world = CacheWorld(impl, page_size, num_pages=64, eviction_policy=eviction_policy)
        self.cache, self.allocator = world.cache, world.allocator

    def insert(self, tokens: Sequence[int], priority: int = 0) -> None:
        value = self.allocator.alloc(len(tokens))
        result = self.cache.insert(RadixKey(list(tokens)), value, priority)
        self.allocator.free(value[: result.prefix_len])

    def match(self, tokens: Sequence[int], times: int = 1) -> list[int]:
        for _ in range(times):
            found: list[int] = self.cache.match_prefix(RadixKey(list(tokens))).device_indices.tolist()
        return found

    def node(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(RadixKey(list(tokens))).last_node

    def keys(self) -> list[list[int]]:
        return sorted(node.key for node in self.cache.nodes())

    def eviction_order(self) -> list[list[int]]:
        """The edges in the order of eviction, one leaf at a time."""
        order = []
        while before := self.keys():
            self.cache.evict(1)
            after = self.keys()
            gone = [key for key in before if key not in after]
            expect_equal("edges that evict(1) removes", len(gone), 1)
            order += gone
        return order


@contract("Evicted slots are freed, and their tokens are no longer found.", page_sizes(1, 4))
def evicted_slots_come_back(impl: type[PrefixCache], case: Case) -> None:
    tree = Tree(impl, page_size=case.page_size)
    length = 4 * case.page_size
    tree.insert(range(length))
    own = set(tree.match(range(length)))
    free = set(tree.allocator.free_slots().tolist())
    expect_equal("evict(1)", tree.cache.evict(1), length)
    expect_equal("slots freed", set(tree.allocator.free_slots().tolist()) - free, own)
    expect_equal("match", tree.match(range(length)), [])
    expect_equal("sizes", sizes(tree.cache), (0, 0))


@contract("evict removes whole leaves, as few as suffice, and returns the number of freed tokens.", EXAMPLE)
def whole_leaves_go(impl: type[PrefixCache], case: Case) -> None:
    tree = Tree(impl)
    tree.insert([1, 2, 3])
    tree.insert([4, 5])
    tree.insert([6])
    expect_equal(
        "evict(4)", tree.cache.evict(4), 5
    )  # 3 do not suffice, and 1 of the next 2 cannot be evicted alone
    expect_equal("edges", tree.keys(), [[6]])
    expect_equal("evict(100) of 1", tree.cache.evict(100), 1)
    expect_equal("evict(1) of nothing", tree.cache.evict(1), 0)


@contract("evict(0) evicts nothing.", EXAMPLE)
def evict_nothing(impl: type[PrefixCache], case: Case) -> None:
    tree = Tree(impl)
    tree.insert([1])
    for num_tokens in (0, -3):
        expect_equal(f"evict({num_tokens})", tree.cache.evict(num_tokens), 0)
    expect_equal("edges", tree.keys(), [[1]])


@contract("A parent is evicted once it is a leaf, within the same call too.", EXAMPLE)
def parents_go_last(impl: type[PrefixCache], case: Case) -> None:
    tree = Tree(impl)
    tree.insert([1, 2, 3])
    tree.insert([1, 2, 4])
    expect_equal("the order", tree.eviction_order(), [[3], [4], [1, 2]])
    tree.insert([1, 2, 3])
    tree.insert([1, 2, 4])
    expect_equal("evict(4)", tree.cache.evict(4), 4)
    expect_equal("free slots", tree.allocator.available_size(), tree.allocator.size)


@contract("A locked node and its ancestors are never evicted.", grid("{policy}", policy=POLICIES))
def locked_nodes_stay(impl: type[PrefixCache], case: Case) -> None:
    tree = Tree(impl, case.policy)
    for tokens in ([1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [8, 9]):
        tree.insert(tokens)
    kept = tree.match([1, 2, 3])
    tree.cache.inc_lock_ref(tree.node([1, 2, 3]))
    expect_equal("evict(100)", tree.cache.evict(100), 4)
    expect_equal("the locked path's slots", tree.match([1, 2, 3, 5]), kept)
    expect_equal("sizes", sizes(tree.cache), (0, 3))
    expect_equal("evict(1) when all is locked", tree.cache.evict(1), 0)
    tree.cache.dec_lock_ref(tree.node([1, 2, 3]))
    expect_equal("evict(100) without the lock", tree.cache.evict(100), 3)
    expect_equal("free slots", tree.allocator.available_size(), tree.allocator.size)


@contract("A cache without pools evicts too.", EXAMPLE)
def evict_without_pools(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(1)
    cache.insert(RadixKey([1, 2, 3]), slots(0, 3))
    expect_equal("evict(1)", cache.evict(1), 3)
    expect_equal("sizes", sizes(cache), (0, 0))


def put(*tokens: int, priority: int = 0) -> tuple[tuple[int, ...], int | None]:
    return tokens, priority


def hit(*tokens: int) -> tuple[tuple[int, ...], int | None]:
    return tokens, None


ORDERS = table(
    "policy steps expected",
    (
        "lru: the last access",
        "lru",
        (put(1), put(2), put(3), put(4), hit(2, 99), put(1)),
        ((3,), (4,), (2,), (1,)),
    ),
    (
        "lru: what a match does not reach keeps its time",
        "lru",
        (put(1, 2, 3, 4), put(5, 6), hit(1, 2, 99)),
        ((3, 4), (5, 6), (1, 2)),
    ),
    (
        "lru: so does what an insert cuts off",
        "lru",
        (put(1, 2, 3, 4), put(5, 6), put(1, 2, 7)),
        ((3, 4), (5, 6), (7,), (1, 2)),
    ),
    (
        "lru: a match refreshes all of its path",
        "lru",
        (put(1, 2), put(1, 2, 3), put(9), hit(1, 2, 3)),
        ((9,), (3,), (1, 2)),
    ),
    (
        "lfu: matches and inserts are hits",
        "lfu",
        (put(1), put(2), put(3), hit(1), hit(1), hit(1), put(2), hit(2), hit(3), hit(2), hit(2)),
        ((3,), (1,), (2,)),
    ),
    ("lfu: a new node has no hit", "lfu", (put(1), hit(1), put(2)), ((2,), (1,))),
    (
        "lfu: all of a match's path is hit",
        "lfu",
        (put(1, 2), put(1, 2, 3), *[hit(1, 2, 3)] * 2, put(9), hit(9), hit(9)),
        ((3,), (9,), (1, 2)),
    ),
    (
        "lfu: then the last access",
        "lfu",
        (put(1), put(2), put(3), hit(3), hit(1), hit(2)),
        ((3,), (1,), (2,)),
    ),
    (
        "lfu: the upper half of a split takes over the hits",
        "lfu",
        (put(1, 2, 3), *[hit(1, 2, 3)] * 3, put(4), hit(4), hit(4), hit(1), put(5), *[hit(5)] * 3),
        ((4,), (2, 3), (5,), (1,)),
    ),
    (
        "fifo: creation, whatever was used since",
        "fifo",
        (put(1), put(2), put(3), hit(1), hit(1), put(2)),
        ((1,), (2,), (3,)),
    ),
    (
        "fifo: both halves of a split are as old as the whole",
        "fifo",
        (put(1, 2), put(3), put(4), *[hit(1)] * 3, put(5)),
        ((2,), (1,), (3,), (4,), (5,)),
    ),
    (
        "mru: the latest access first",
        "mru",
        (put(1), put(2), put(3), put(4), hit(2, 99), put(1)),
        ((1,), (2,), (4,), (3,)),
    ),
    (
        "mru: a leaf that is used again and again goes first, and its parent in its place",
        "mru",
        (put(1, 2), put(8), put(1, 2, 3), hit(8), hit(1, 2, 3), put(9), hit(8), hit(1, 2)),
        ((8,), (9,), (3,), (1, 2)),
    ),
    (
        "mru: what a match does not reach keeps its time",
        "mru",
        (put(1, 2, 3, 4), put(5, 6), hit(1, 2, 99)),
        ((5, 6), (3, 4), (1, 2)),
    ),
    (
        "filo: the newest first, whatever was used since",
        "filo",
        (put(1), put(2), put(3), hit(1), hit(1), put(2)),
        ((3,), (2,), (1,)),
    ),
    (
        "filo: both halves of a split are as old as the whole",
        "filo",
        (put(1, 2), put(3), put(4), *[hit(1)] * 3),
        ((4,), (3,), (2,), (1,)),
    ),
    (
        "slru: fewer than two hits first, then the last access",
        "slru",
        (put(1), put(2), hit(1), hit(1), put(3), hit(3), put(4), hit(2), put(5)),
        ((3,), (4,), (2,), (5,), (1,)),
    ),
    (
        "slru: from two hits on only the last access counts",
        "slru",
        (put(1), put(2), *[hit(1)] * 5, hit(2), hit(2), put(3), *[hit(3)] * 2, hit(1)),
        ((2,), (3,), (1,)),
    ),
    (
        "slru: the upper half of a split takes over the hits",
        "slru",
        (put(1, 2), hit(1, 2), hit(1, 2), put(3), hit(3), hit(1), put(4)),
        ((3,), (4,), (2,), (1,)),
    ),
    (
        "priority: the least important first, then the last access",
        "priority",
        (put(1, priority=5), put(2), put(3, priority=5), put(4, priority=-2), hit(1)),
        ((4,), (2,), (3,), (1,)),
    ),
    (
        "priority: raised, and never lowered",
        "priority",
        (put(1), put(2, priority=3), put(3, priority=4), put(1, priority=7), put(3, priority=1)),
        ((2,), (3,), (1,)),
    ),
    (
        "priority: raised along the path",
        "priority",
        (put(1, 2, 3), put(1, 9, priority=7), put(8, priority=7), hit(1)),
        ((2, 3), (9,), (8,), (1,)),
    ),
    (
        "priority: both halves of a split are as important as the whole",
        "priority",
        (put(1, 2, 3, priority=5), put(8, priority=5), hit(1)),
        ((2, 3), (8,), (1,)),
    ),
)


@contract("Leaves are evicted in the order of the policy.", ORDERS)
def eviction_order(impl: type[PrefixCache], case: Case) -> None:
    """`steps`: (tokens, priority) inserts, (tokens, None) matches."""
    tree = Tree(impl, case.policy)
    for tokens, priority in case.steps:
        if priority is None:
            tree.match(tokens)
        else:
            tree.insert(tokens, priority)
    expect_equal("the order", tuple(tuple(key) for key in tree.eviction_order()), case.expected)


@contract("A page size below 1 and an unknown eviction policy are refused.", EXAMPLE)
def bad_arguments(impl: type[PrefixCache], case: Case) -> None:
    expect_raises("page_size 0", ValueError, impl, 0)
    expect_raises("eviction_policy 'lifo'", ValueError, lambda: impl(1, eviction_policy="lifo"))  # type: ignore[arg-type]
    for policy in POLICIES:
        impl(1, eviction_policy=policy)
