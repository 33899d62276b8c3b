"""RadixCache as a tree: matching, inserting, splitting and locking, clause by clause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shared import registry
from shared.interfaces.prefix_cache import RadixKey

from .harness import IMPLS, make_cache

PAGE_SIZES = [1, 2, 4]


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


def key(*tokens: int, extra_key: str | None = None) -> RadixKey:
    return RadixKey(list(tokens), extra_key)


def slots(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count)


def insert(cache: Any, tokens: Sequence[int], start: int, **options: Any) -> int:
    """Insert tokens with slots start, start + 1, ...; how many were there before."""
    return cache.insert(RadixKey(list(tokens)), slots(start, len(tokens)), **options).prefix_len


def match(cache: Any, tokens: Sequence[int], extra_key: str | None = None) -> list[int]:
    return cache.match_prefix(RadixKey(list(tokens), extra_key)).device_indices.tolist()


def sizes(cache: Any) -> tuple[int, int]:
    return cache.evictable_size(), cache.protected_size()


def edges(cache: Any) -> list[tuple[list[int], int]]:
    return sorted((node.key, node.lock_ref) for node in cache.nodes())


# ---- matching and inserting ----


@pytest.mark.parametrize("page_size", [0, -1])
def test_page_size_must_be_positive(impl: str, page_size: int) -> None:
    with pytest.raises(ValueError, match=str(page_size)):
        make_cache(impl, page_size)


def test_an_unknown_eviction_policy_is_refused(impl: str) -> None:
    with pytest.raises(ValueError, match="mru"):
        make_cache(impl, eviction_policy="mru")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_empty_key_matches_the_root_and_inserts_nothing(impl: str, page_size: int) -> None:
    cache = make_cache(impl, page_size)
    result = cache.match_prefix(key())
    assert result.device_indices.shape == (0,)
    assert result.device_indices.dtype == torch.int64
    assert cache.node_id(result.last_node) == 0
    assert cache.insert(key(), slots(0, 0)).prefix_len == 0
    assert list(cache.nodes()) == []


@pytest.mark.parametrize("page_size", [2, 4])
def test_a_key_shorter_than_a_page_matches_and_inserts_nothing(impl: str, page_size: int) -> None:
    """CASES A4 (SG#10637)."""
    cache = make_cache(impl, page_size)
    tokens = list(range(page_size))
    result = cache.insert(key(*tokens[:-1]), slots(0, page_size - 1))
    assert (result.prefix_len, cache.node_id(result.last_node)) == (0, 0)
    assert list(cache.nodes()) == []
    insert(cache, tokens, 10)
    assert match(cache, tokens[:-1]) == []
    assert match(cache, tokens) == list(range(10, 10 + page_size))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_matches_and_inserts_whole_pages(impl: str, page_size: int, extra: int) -> None:
    """CASES A4 (SG#5221), A5: lengths page x k and one more or less."""
    cache = make_cache(impl, page_size)
    length = 3 * page_size + extra
    whole = length // page_size * page_size
    assert insert(cache, range(length), 100) == 0
    assert sizes(cache) == (whole, 0)
    for query_len in range(length + 5):
        expected = min(query_len // page_size * page_size, whole)
        assert match(cache, range(query_len)) == list(range(100, 100 + expected))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_match_that_ends_within_a_page_is_cut_to_the_page(impl: str, page_size: int) -> None:
    """CASES A4 (SG#5221): the keys part in the middle of a page; nothing of that page is shared."""
    cache = make_cache(impl, page_size)
    length = 4 * page_size
    insert(cache, range(length), 100)
    for parting in range(length):
        tokens = [*range(parting), *[77] * page_size * 2]
        whole = parting // page_size * page_size
        result = cache.match_prefix(key(*tokens))
        assert result.device_indices.tolist() == list(range(100, 100 + whole))
        assert all(len(node.key) % page_size == 0 for node in cache.nodes())
    assert sizes(cache) == (length, 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_insert_reports_what_was_there_and_keeps_its_slots(impl: str, page_size: int) -> None:
    cache = make_cache(impl, page_size)
    p = page_size
    insert(cache, range(2 * p), 100)
    assert insert(cache, range(4 * p), 200) == 2 * p
    assert match(cache, range(4 * p)) == [*range(100, 100 + 2 * p), *range(200 + 2 * p, 200 + 4 * p)]
    branch = [*range(p), *range(50, 50 + 2 * p)]
    assert insert(cache, branch, 300) == p
    assert match(cache, branch) == [*range(100, 100 + p), *range(300 + p, 300 + 3 * p)]
    assert sizes(cache) == (4 * p + 2 * p, 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_insert_of_what_is_there_creates_nothing(impl: str, page_size: int) -> None:
    cache = make_cache(impl, page_size)
    p = page_size
    insert(cache, range(3 * p), 100)
    nodes = list(cache.nodes())
    result = cache.insert(key(*range(3 * p)), slots(200, 3 * p))
    assert result.prefix_len == 3 * p
    assert list(cache.nodes()) == nodes
    assert insert(cache, range(2 * p), 300) == 2 * p
    assert sizes(cache) == (3 * p, 0)
    assert match(cache, range(3 * p)) == list(range(100, 100 + 3 * p))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [2, 3, 5])
def test_the_node_of_insert_holds_the_last_token(impl: str, page_size: int, length: int) -> None:
    """Also when the key ends within an existing node: locking it must lock the key and no more."""
    cache = make_cache(impl, page_size)
    insert(cache, range(4 * page_size), 100)
    node = cache.insert(key(*range(length * page_size)), slots(200, length * page_size)).last_node
    cache.inc_lock_ref(node)
    assert cache.protected_size() == length * page_size


def test_values_are_copied(impl: str) -> None:
    cache = make_cache(impl)
    value = slots(100, 4)
    cache.insert(key(1, 2, 3, 4), value)
    value.fill_(-1)
    assert match(cache, [1, 2, 3, 4]) == [100, 101, 102, 103]
    cache.match_prefix(key(1, 2)).device_indices.fill_(-1)
    assert match(cache, [1, 2, 3, 4]) == [100, 101, 102, 103]


def test_surplus_slots_are_ignored(impl: str) -> None:
    cache = make_cache(impl, 2)
    cache.insert(key(1, 2, 3), slots(100, 9))
    assert match(cache, [1, 2, 3, 4]) == [100, 101]


def test_the_key_is_copied(impl: str) -> None:
    """A request's token list goes on growing after it was inserted."""
    cache = make_cache(impl)
    tokens = [1, 2, 3]
    cache.insert(RadixKey(tokens), slots(100, 3))
    tokens.append(4)
    tokens[0] = 9
    assert match(cache, [1, 2, 3, 4]) == [100, 101, 102]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_namespaces_never_share(impl: str, page_size: int) -> None:
    cache = make_cache(impl, page_size)
    tokens = list(range(2 * page_size))
    for start, extra_key in ((100, None), (200, "a"), (300, ""), (400, "b")):
        assert match(cache, tokens, extra_key) == []
        assert cache.insert(RadixKey(tokens, extra_key), slots(start, len(tokens))).prefix_len == 0
    for start, extra_key in ((100, None), (200, "a"), (300, ""), (400, "b")):
        assert match(cache, tokens, extra_key) == list(range(start, start + len(tokens)))
    assert match(cache, tokens, "c") == []
    assert {node.extra_key for node in cache.nodes()} == {None, "a", "", "b"}


@pytest.mark.parametrize("page_size", [1, 2])
def test_bigrams_match_only_with_the_same_next_token(impl: str, page_size: int) -> None:
    """A draft model's KV of token i depends on token i + 1: n tokens are n - 1 entries."""
    cache = make_cache(impl, page_size, is_bigram=True)
    bigrams = RadixKey([1, 2, 3, 4, 5], is_bigram=True)
    assert len(bigrams) == 4
    assert len(RadixKey([], is_bigram=True)) == len(RadixKey([1], is_bigram=True)) == 0
    cache.insert(bigrams, slots(100, 4))
    assert cache.evictable_size() == 4
    for tokens, expected in (
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4, 9], 3),  # token 4 is followed by another one
        ([1, 2, 3], 2),
        ([1], 0),
        ([], 0),
    ):
        found = cache.match_prefix(RadixKey(tokens, is_bigram=True)).device_indices.tolist()
        assert found == list(range(100, 100 + expected // page_size * page_size))
    assert match(cache, [1, 2, 3, 4]) == []  # plain tokens are other keys


def test_long_keys_match_to_the_token(impl: str) -> None:
    cache = make_cache(impl)
    insert(cache, range(500), 1000)
    for length in (1, 63, 64, 65, 127, 128, 129, 499, 500):
        assert len(match(cache, [*range(length), -1])) == length
    assert len(match(cache, range(900))) == 500


# ---- splitting and locking ----


def test_a_split_keeps_locks_totals_and_the_lower_half_s_identity(impl: str) -> None:
    """CASES A4. A holder of the whole node still holds all of it through the lower half."""
    cache = make_cache(impl)
    insert(cache, range(6), 100)
    holder = cache.match_prefix(key(*range(6))).last_node
    holder_id = cache.node_id(holder)
    cache.inc_lock_ref(holder)
    cache.inc_lock_ref(holder)
    upper = cache.match_prefix(key(0, 1, 2, 3)).last_node
    assert upper is not holder
    assert cache.node_id(holder) == holder_id
    assert edges(cache) == [([0, 1, 2, 3], 2), ([4, 5], 2)]
    by_id = {node.node_id: node for node in cache.nodes()}
    assert by_id[holder_id].key == [4, 5]
    assert by_id[holder_id].slots == [104, 105]
    assert by_id[holder_id].parent_id == cache.node_id(upper)
    assert by_id[cache.node_id(upper)].slots == [100, 101, 102, 103]
    assert sizes(cache) == (0, 6)
    cache.dec_lock_ref(holder)
    assert edges(cache) == [([0, 1, 2, 3], 1), ([4, 5], 1)]
    cache.dec_lock_ref(holder)
    assert sizes(cache) == (6, 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_match_locks_no_more_than_it_matched(impl: str, page_size: int) -> None:
    """CASES A4 (bytedance-iaas/sglang#508)."""
    cache = make_cache(impl, page_size)
    insert(cache, range(4 * page_size), 100)
    cache.inc_lock_ref(cache.match_prefix(key(*range(3 * page_size), 99)).last_node)
    assert sizes(cache) == (page_size, 3 * page_size)


def test_sizes_stay_right_when_a_locked_node_is_split_and_released(impl: str) -> None:
    """CASES A1 (UbiquitousLearning/mllm#656: evictable went negative)."""
    cache = make_cache(impl)
    insert(cache, range(8), 100)
    whole = cache.match_prefix(key(*range(8))).last_node
    cache.inc_lock_ref(whole)
    half = cache.match_prefix(key(*range(4))).last_node
    cache.inc_lock_ref(half)
    assert insert(cache, [0, 1, 77], 200) == 2
    assert sizes(cache) == (1, 8)
    cache.dec_lock_ref(whole)
    assert sizes(cache) == (5, 4)
    cache.dec_lock_ref(half)
    assert sizes(cache) == (9, 0)
    assert all(node.lock_ref == 0 for node in cache.nodes())


def test_locks_count_along_the_path(impl: str) -> None:
    cache = make_cache(impl)
    for tokens, start in (([1, 2, 3], 10), ([1, 2, 4], 20), ([1, 5], 30)):
        insert(cache, tokens, start)
    first = cache.match_prefix(key(1, 2, 3)).last_node
    second = cache.match_prefix(key(1, 2, 4)).last_node
    cache.inc_lock_ref(first)
    cache.inc_lock_ref(second)
    assert edges(cache) == [([1], 2), ([2], 2), ([3], 1), ([4], 1), ([5], 0)]
    assert sizes(cache) == (1, 4)
    cache.dec_lock_ref(first)
    assert edges(cache) == [([1], 1), ([2], 1), ([3], 0), ([4], 1), ([5], 0)]


def test_locking_the_root_changes_nothing(impl: str) -> None:
    cache = make_cache(impl)
    insert(cache, [1, 2], 10)
    root = cache.match_prefix(key(9)).last_node
    cache.inc_lock_ref(root)
    cache.dec_lock_ref(root)
    cache.dec_lock_ref(root)
    assert sizes(cache) == (2, 0)


def test_a_lock_below_zero_is_an_error(impl: str) -> None:
    cache = make_cache(impl)
    node = cache.insert(key(1, 2), slots(10, 2)).last_node
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    with pytest.raises(AssertionError):
        cache.dec_lock_ref(node)


# ---- looking in, forgetting ----


def test_nodes_come_parents_first_and_have_ids(impl: str) -> None:
    cache = make_cache(impl, 2)
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6, 7, 8], [9, 9]):
        insert(cache, tokens, 10 * len(tokens))
    seen = {0}
    for node in cache.nodes():
        assert node.parent_id in seen
        assert node.node_id not in seen
        assert len(node.key) == len(node.slots)
        seen.add(node.node_id)
    result = cache.match_prefix(key(1, 2, 5, 6))
    (node,) = [n for n in cache.nodes() if n.node_id == cache.node_id(result.last_node)]
    assert node.key == [5, 6]


def test_reset_forgets_everything_and_frees_nothing(impl: str) -> None:
    pools = registry.load("memory_pool", "reference")
    allocator = pools.TokenToKVPoolAllocator(8, 2, "cpu")
    cache = make_cache(impl, 2, allocator=allocator, req_to_token_pool=pools.ReqToTokenPool(2, 8, "cpu"))
    node = cache.insert(key(1, 2, 3, 4), allocator.alloc(4)).last_node
    cache.inc_lock_ref(node)
    cache.reset()
    assert sizes(cache) == (0, 0)
    assert list(cache.nodes()) == []
    assert match(cache, [1, 2, 3, 4]) == []
    assert allocator.available_size() == 4
    allocator.clear()
    cache.insert(key(1, 2, 3, 4), allocator.alloc(4))
    assert cache.evict(4) == 4
    assert allocator.available_size() == 8
