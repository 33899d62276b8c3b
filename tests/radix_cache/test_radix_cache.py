"""The prefix caches beyond their contract (tests/conformance), and a search for calls that break it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from diptych.reference.chunk_cache import ChunkCache
from diptych.reference.radix_cache import RadixCache
from diptych.shared.flags.engine_flags import EvictionPolicyName
from diptych.shared.interfaces.prefix_cache import RadixKey
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.contracts.radix_cache import request_lives, sequences
from diptych.shared.tools.conformance.contracts.radix_cache.request_lives import Event
from diptych.shared.tools.conformance.contracts.radix_cache.sequences import Call
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld
from tests.properties import given, settings, st

POLICIES = st.sampled_from(get_args(EvictionPolicyName))
PAGE_SIZES = [1, 2, 4]


def some(element: st.SearchStrategy[Any], at_most: int) -> st.SearchStrategy[list[Any]]:
    """Lists of any length alike: lists() alone prefers short ones."""
    return st.integers(0, at_most).flatmap(lambda n: st.lists(element, min_size=n, max_size=n))


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_bad_page_size_is_named(page_size: int) -> None:
    with pytest.raises(ValueError, match=str(page_size)):
        RadixCache(page_size)


def test_an_unknown_eviction_policy_is_named_beside_the_known() -> None:
    with pytest.raises(ValueError, match=r"lifo.*lru, lfu, fifo, mru, filo, priority, slru"):
        RadixCache(1, eviction_policy="lifo")


def test_the_length_of_a_key_is_that_of_its_entries() -> None:
    assert [len(RadixKey(list(range(n)))) for n in range(4)] == [0, 1, 2, 3]
    assert [len(RadixKey(list(range(n)), is_bigram=True)) for n in range(4)] == [0, 0, 1, 2]


def test_an_evicted_node_cannot_be_locked() -> None:
    cache = RadixCache(1)
    node = cache.insert(RadixKey([1]), torch.tensor([5])).last_node
    cache.evict(1)
    with pytest.raises(AssertionError, match="no longer in the tree"):
        cache.inc_lock_ref(node)


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(AssertionError, match="2 slots for 3 tokens"):
        RadixCache(1).insert(RadixKey([1, 2, 3]), torch.tensor([5, 6]))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@settings(max_examples=120)
@given(data=st.data(), policy=POLICIES, is_bigram=st.booleans(), num_pages=st.sampled_from([8, 48]))
def test_no_calls_break_the_tree(
    page_size: int, data: st.DataObject, policy: str, is_bigram: bool, num_pages: int
) -> None:
    # Few different tokens: keys share prefixes and part in all places.
    tokens = st.lists(st.integers(0, 1), max_size=4 * page_size + 3).map(tuple)
    call = st.builds(
        Call,
        kind=st.sampled_from(["insert", "insert", "insert", "match", "lock", "unlock", "evict"]),
        tokens=tokens,
        extra_key=st.sampled_from([None, None, "a", "b"]),
        number=st.integers(-1, 12),
    )
    calls = tuple(data.draw(some(call, 40)))
    case = Case(
        "found", page_size=page_size, policy=policy, is_bigram=is_bigram, calls=calls, num_pages=num_pages
    )
    sequences.Run(RadixCache, case).play()


@pytest.mark.parametrize("impl", [RadixCache, ChunkCache])
def test_a_finished_request_has_no_slots_left(impl: Any) -> None:
    world = CacheWorld(impl, 2)
    req = world.prefill(range(5))
    world.decode(req, 7)
    world.finish(req)
    assert (req.req_pool_idx, req.last_node, len(req.prefix_indices)) == (None, None, 0)


@pytest.mark.parametrize(
    ("impl", "page_size"),
    [
        *((RadixCache, page_size) for page_size in PAGE_SIZES),
        *(pytest.param(ChunkCache, size, marks=[] if size == 2 else pytest.mark.full) for size in PAGE_SIZES),
    ],
)
@settings(max_examples=40)
@given(data=st.data(), policy=POLICIES)
def test_no_lives_break_the_cache(impl: Any, page_size: int, data: st.DataObject, policy: str) -> None:
    event = st.builds(
        Event,
        kind=st.sampled_from(
            [
                "admit",
                "admit",
                "readmit",
                "chunk",
                "decode",
                "decode",
                "over-allocate",
                "retract",
                "finish",
                "drop",
            ]
        ),
        which=st.integers(0, 20),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5 * page_size + 2).map(tuple),
        chunk=st.sampled_from([0, page_size, 2 * page_size, 3]),
        extra_key=st.sampled_from([None, "a"]),
        priority=st.integers(0, 2),
        is_cached_at_once=st.booleans(),
        token=st.integers(0, 1),
    )
    events = tuple(data.draw(some(event, 30)))
    case = Case("found", page_size=page_size, policy=policy, events=events, num_pages=14)
    request_lives.Run(impl, case).play()
