"""Clauses of the radix cache: match and insert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared.interfaces import PrefixCache, RadixKey
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, page_sizes, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true

PAGE_SIZES = page_sizes(1, 2, 4)
LARGE_PAGES = page_sizes(2, 4, 16)


def slots(start: int, count: int) -> torch.Tensor:
    """Slots for a cache without pools; its values may be on any device."""
    return torch.arange(start, start + count)


def insert(cache: PrefixCache, tokens: Sequence[int], start: int, priority: int = 0) -> int:
    """Insert tokens with slots start, start + 1, ...; returns how many were already cached."""
    return cache.insert(RadixKey(list(tokens)), slots(start, len(tokens)), priority).prefix_len


def match(cache: PrefixCache, tokens: Sequence[int], extra_key: str | None = None) -> list[int]:
    found: list[int] = cache.match_prefix(RadixKey(list(tokens), extra_key)).device_indices.tolist()
    return found


def sizes(cache: PrefixCache) -> tuple[int, int]:
    return cache.evictable_size(), cache.protected_size()


def up_to(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


@contract("disable is False in a cache that finds prefixes.", EXAMPLE)
def is_not_disabled(impl: type[PrefixCache], case: Case) -> None:
    expect_equal("disable", impl(1).disable, False)
    expect_equal("page_size", impl(4).page_size, 4)


@contract(
    "The empty key matches nothing (the root and an empty int64 tensor) and inserts nothing.",
    PAGE_SIZES,
)
def empty_key(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(case.page_size)
    for _ in range(2):
        result = cache.match_prefix(RadixKey([]))
        expect_equal("the match", result.device_indices, slots(0, 0))
        expect_equal("the number of the matched node", cache.node_id(result.last_node), 0)
        expect_equal("prefix_len", cache.insert(RadixKey([]), slots(0, 0)).prefix_len, 0)
        cache.match_prefix(RadixKey([5] * case.page_size))
    expect_equal("nodes", list(cache.nodes()), [])
    expect_equal("sizes", sizes(cache), (0, 0))


@contract("A key shorter than a page matches nothing and inserts nothing.", LARGE_PAGES)
def key_shorter_than_a_page(impl: type[PrefixCache], case: Case) -> None:
    page_size = case.page_size
    cache = impl(page_size)
    tokens = up_to(0, page_size)
    for length in range(page_size):
        result = cache.insert(RadixKey(tokens[:length]), slots(0, length))
        where = (result.prefix_len, cache.node_id(result.last_node))
        expect_equal(f"insert of {length} tokens: prefix_len, node", where, (0, 0))
    expect_equal("nodes", list(cache.nodes()), [])
    insert(cache, tokens, 10)
    for length in range(page_size):
        expect_equal(f"match of {length} tokens", match(cache, tokens[:length]), [])
    expect_equal("match of a page", match(cache, tokens), up_to(10, page_size))


AROUND_PAGES = table(
    "page_size length",
    *((p, 3 * p + extra) for p in (1, 2, 4, 16) for extra in (-1, 0, 1)),
    name="page {page_size}, {length} tokens",
)


@contract("Whole pages are stored and found, for lengths at and beside multiples of the page.", AROUND_PAGES)
def whole_pages(impl: type[PrefixCache], case: Case) -> None:
    page_size, length = case.page_size, case.length
    cache = impl(page_size)
    whole = length // page_size * page_size
    expect_equal("prefix_len in an empty cache", insert(cache, range(length), 100), 0)
    expect_equal("sizes", sizes(cache), (whole, 0))
    for query_len in range(length + 5):
        expected = min(query_len // page_size * page_size, whole)
        expect_equal(f"match of {query_len} tokens", match(cache, range(query_len)), up_to(100, expected))


@contract("Keys that differ within a page share nothing of that page.", PAGE_SIZES)
def parting_within_a_page(impl: type[PrefixCache], case: Case) -> None:
    page_size = case.page_size
    length = 4 * page_size
    for parting in range(length):
        cache = impl(page_size)
        insert(cache, range(length), 100)
        whole = parting // page_size * page_size
        found = match(cache, [*range(parting), *[77] * page_size * 2])
        expect_equal(f"match of a key that parts after {parting}", found, up_to(100, whole))
        lengths = [len(node.key) for node in cache.nodes()]
        expect_true("every edge is a multiple of page_size", not any(n % page_size for n in lengths), lengths)
        expect_equal("sizes", sizes(cache), (length, 0))


@contract(
    "insert returns the length that was cached before, and existing nodes keep their slots.", PAGE_SIZES
)
def insert_keeps_slots(impl: type[PrefixCache], case: Case) -> None:
    p = case.page_size
    cache = impl(p)
    insert(cache, range(2 * p), 100)
    expect_equal("prefix_len of a longer key", insert(cache, range(4 * p), 200), 2 * p)
    expected = [*up_to(100, 2 * p), *up_to(200 + 2 * p, 2 * p)]
    expect_equal("the longer key's slots", match(cache, range(4 * p)), expected)
    branch = [*range(p), *range(50, 50 + 2 * p)]
    expect_equal("prefix_len of a branch", insert(cache, branch, 300), p)
    expected = [*up_to(100, p), *up_to(300 + p, 2 * p)]
    expect_equal("the branch's slots", match(cache, branch), expected)
    expect_equal("sizes", sizes(cache), (4 * p + 2 * p, 0))


@contract("Inserting a cached key creates no node.", PAGE_SIZES)
def insert_twice(impl: type[PrefixCache], case: Case) -> None:
    p = case.page_size
    cache = impl(p)
    insert(cache, range(3 * p), 100)
    nodes = list(cache.nodes())
    expect_equal("prefix_len", insert(cache, range(3 * p), 200), 3 * p)
    expect_equal("nodes", list(cache.nodes()), nodes)
    expect_equal("prefix_len of a part", insert(cache, range(2 * p), 300), 2 * p)
    expect_equal("sizes", sizes(cache), (3 * p, 0))
    expect_equal("slots", match(cache, range(3 * p)), up_to(100, 3 * p))


@contract(
    "insert returns the node that holds the last token of the key, also inside an existing edge.", PAGE_SIZES
)
def node_of_insert(impl: type[PrefixCache], case: Case) -> None:
    for num_pages in (2, 3, 5):
        cache = impl(case.page_size)
        insert(cache, range(4 * case.page_size), 100)
        length = num_pages * case.page_size
        node = cache.insert(RadixKey(list(range(length))), slots(200, length)).last_node
        cache.inc_lock_ref(node)
        expect_equal(f"tokens that its lock protects, of {length}", cache.protected_size(), length)


@contract("Keys, values and results are copied: later changes by the caller do not change the tree.", EXAMPLE)
def copies(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(1)
    tokens, value = [1, 2, 3], slots(100, 3)
    cache.insert(RadixKey(tokens), value)
    value.fill_(-1)
    tokens.append(4)
    tokens[0] = 9
    expect_equal("after the value and the key changed", match(cache, [1, 2, 3, 4]), [100, 101, 102])
    cache.match_prefix(RadixKey([1, 2, 3])).device_indices.fill_(-1)
    expect_equal("after a result changed", match(cache, [1, 2, 3]), [100, 101, 102])
    cache.match_prefix(RadixKey([1, 2])).device_indices.fill_(-1)
    expect_equal("after another one's changed", match(cache, [1, 2, 3]), [100, 101, 102])


@contract("insert ignores slots beyond the tokens of the key.", EXAMPLE)
def surplus_slots(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(2)
    cache.insert(RadixKey([1, 2, 3]), slots(100, 9))
    expect_equal("match", match(cache, [1, 2, 3, 4]), [100, 101])
    expect_equal("sizes", sizes(cache), (2, 0))


@contract("Keys of different extra_key never match; None is a namespace of its own.", PAGE_SIZES)
def namespaces(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(case.page_size)
    tokens = list(range(2 * case.page_size))
    spaces: dict[str | None, int] = {None: 100, "a": 200, "": 300, "b": 400}
    for extra_key, start in spaces.items():
        expect_equal(f"match in {extra_key!r} before its insert", match(cache, tokens, extra_key), [])
        result = cache.insert(RadixKey(tokens, extra_key), slots(start, len(tokens)))
        expect_equal(f"prefix_len in {extra_key!r}", result.prefix_len, 0)
    for extra_key, start in spaces.items():
        expect_equal(f"match in {extra_key!r}", match(cache, tokens, extra_key), up_to(start, len(tokens)))
    expect_equal("match in a namespace without keys", match(cache, tokens, "c"), [])
    expect_equal("namespaces of nodes()", {node.extra_key for node in cache.nodes()}, set(spaces))


@contract("A bigram matches only with the same next token: n tokens are n - 1 entries.", page_sizes(1, 2))
def bigrams(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(case.page_size, is_bigram=True)
    cache.insert(RadixKey([1, 2, 3, 4, 5], is_bigram=True), slots(100, 4))
    expect_equal("evictable_size()", cache.evictable_size(), 4 // case.page_size * case.page_size)
    for tokens, num_entries in (
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4, 9], 3),  # token 4 has another successor
        ([1, 2, 3], 2),
        ([1], 0),
        ([], 0),
    ):
        found = cache.match_prefix(RadixKey(tokens, is_bigram=True)).device_indices.tolist()
        expect_equal(f"match of {tokens}", found, up_to(100, num_entries // case.page_size * case.page_size))
    expect_equal("match of plain tokens", match(cache, [1, 2, 3, 4]), [])


@contract(
    "Long keys match up to the first different token.",
    grid("{length} of 500", length=(1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 499, 500)),
)
def long_keys(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(1)
    insert(cache, range(500), 1000)
    found = match(cache, [*range(case.length), -1])
    expect_equal(f"match of {case.length} tokens and a strange one", found, up_to(1000, case.length))
    expect_equal("match of all", match(cache, range(900)), up_to(1000, 500))
