"""What becomes of a request's memory: cached after prefill and chunks, released at the end, once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.conformance.invariants import check_idle

from .harness import IMPLS, World

PAGE_SIZES = [1, 2, 4]
COMPONENTS = ["radix_cache", "chunk_cache"]


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_idle(world: World) -> None:
    assert not world.live
    check_idle(world.allocator, world.req_to_token_pool, world.cache)
    num_cached = world.cache.evictable_size()
    assert world.allocator.available_size() + num_cached == world.allocator.size
    assert world.cache.evict(world.allocator.size) == num_cached
    assert world.allocator.available_size() == world.allocator.size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_after_prefill_whole_pages_are_the_tree_s(impl: str, page_size: int, extra: int) -> None:
    """And the partial page stays private, though prefix_indices includes it."""
    world = World(impl, page_size)
    length = 3 * page_size + extra
    whole = length // page_size * page_size
    req = world.admit(range(length))
    row = world.row(req)
    world.cache_unfinished(req)
    world.check()
    assert req.cache_protected_len == whole
    assert req.prefix_indices.tolist() == world.row(req) == row
    assert req.prefix_indices.dtype == torch.int64
    assert world.match(range(100)) == row[:whole]
    assert (world.cache.evictable_size(), world.cache.protected_size()) == (0, whole)
    world.finish(req)
    assert world.cache.evictable_size() == whole
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("chunk", [4, 8])
def test_chunk_after_chunk_continues_where_the_last_one_ended(impl: str, page_size: int, chunk: int) -> None:
    world = World(impl, page_size)
    req = world.admit(range(19), chunk=chunk)
    done = chunk
    while True:
        world.cache_unfinished(req)
        world.check()
        assert len(req.prefix_indices) == done
        assert req.cache_protected_len == done // page_size * page_size
        if done == 19:
            break
        world.extend(req, chunk)
        world.check()
        done = min(done + chunk, 19)
    world.finish(req)
    assert len(world.match(range(19))) == 19 // page_size * page_size
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_row_is_remapped_before_duplicates_are_freed(
    impl: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES A2 (mini-sglang#142): two requests compute the same prompt; the second one lost the race. While
    its row still named the slots being freed, another request could have overwritten what it reads."""
    world = World(impl, page_size)
    length = 3 * page_size + 1
    first, second = world.admit(range(length)), world.admit(range(length))
    own = world.row(second)
    assert set(own).isdisjoint(world.row(first))
    world.cache_unfinished(first)
    freed: list[int] = []
    free = world.allocator.free

    def free_and_look(slots: torch.Tensor) -> None:
        assert set(slots.tolist()).isdisjoint(world.row(second))
        freed.extend(slots.tolist())
        free(slots)

    monkeypatch.setattr(world.allocator, "free", free_and_look)
    world.cache_unfinished(second)
    monkeypatch.undo()
    whole = length // page_size * page_size
    assert freed == own[:whole]
    assert world.row(second) == world.row(first)[:whole] + own[whole:]
    world.check()
    taken = world.prefill(range(50, 50 + 3 * page_size))  # takes the freed slots
    world.check()
    for req in (first, second, taken):
        world.finish(req)
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_duplicates_beside_a_matched_prefix_are_freed_alone(impl: str, page_size: int) -> None:
    """The matched prefix is the tree's: neither it nor the partial page may be freed with the duplicates."""
    world = World(impl, page_size)
    p = page_size
    world.finish(world.prefill(range(2 * p)))
    first, second = world.admit(range(5 * p + 1)), world.admit(range(4 * p + 1))
    assert first.cache_protected_len == second.cache_protected_len == 2 * p
    world.cache_unfinished(first)
    world.cache_unfinished(second)
    world.check()
    assert world.row(second)[: 4 * p] == world.row(first)[: 4 * p]
    assert second.cache_protected_len == (4 * p + 1) // p * p
    world.finish(second)
    world.check()
    world.finish(first)
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_full_prompt_hit_still_computes_the_last_token(impl: str, page_size: int, extra: int) -> None:
    """CASES A5."""
    world = World(impl, page_size)
    length = 3 * page_size + extra
    world.finish(world.prefill(range(length)))
    again = world.admit(range(length))
    assert len(again.prefix_indices) == (length - 1) // page_size * page_size
    assert again.extend_input_len >= 1
    world.cache_unfinished(again)
    world.check()
    world.finish(again)
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_steps", [0, 1, 4, 7])
def test_finish_caches_the_committed_tokens(impl: str, page_size: int, num_steps: int) -> None:
    """The last sampled token has no KV. CASES A4 (SG#38941): the unaligned tail is freed once."""
    world = World(impl, page_size)
    req = world.prefill(range(6))
    req.output_ids.append(100)
    for step in range(num_steps):
        assert world.decode(req, 101 + step)
        world.check()
    tokens, row = req.all_ids, world.row(req)
    assert req.kv_committed_len == len(tokens) - 1
    whole = (len(tokens) - 1) // page_size * page_size
    world.finish(req)
    assert world.match([*tokens, 0]) == row[:whole]
    assert world.cache.evictable_size() == whole
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("num_extra", [1, 2, 5])
@pytest.mark.parametrize("is_insert", [True, False])
def test_over_allocated_slots_are_freed_once(
    impl: str, page_size: int, component: str, num_extra: int, is_insert: bool
) -> None:
    """CASES A3: a step in flight, or rejected drafts, leave slots that were never committed."""
    world = World(impl, page_size, component=component)
    req = world.prefill(range(7))
    world.over_allocate(req, num_extra)
    world.check()
    world.finish(req, is_insert)
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_finish_of_a_duplicate_frees_it(impl: str, page_size: int) -> None:
    """Two requests decode the same tokens side by side; the second one's pages are not needed."""
    world = World(impl, page_size)
    reqs = [world.prefill(range(5)), world.prefill(range(5))]
    for step in range(6):
        for req in reqs:
            world.decode(req, 100 + step)
        world.check()
    first_row = world.row(reqs[0])
    world.finish(reqs[0])
    world.check()
    tokens = reqs[1].all_ids
    world.finish(reqs[1])
    whole = (len(tokens) - 1) // page_size * page_size
    assert world.match(tokens[:-1]) == first_row[:whole]
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_finish_without_insert_leaves_only_what_the_tree_had(impl: str, page_size: int) -> None:
    world = World(impl, page_size)
    req = world.prefill(range(9))
    for step in range(5):
        world.decode(req, 100 + step)
    whole = 9 // page_size * page_size
    world.finish(req, is_insert=False)
    assert world.cache.evictable_size() == whole
    assert len(world.match(range(9))) == whole
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_retracted_request_finds_its_prompt_again(impl: str, page_size: int) -> None:
    """CASES A6: its outputs count as prompt then, and it owns nothing in between."""
    world = World(impl, page_size)
    req = world.prefill(range(8))
    for step in range(3):
        world.decode(req, 100 + step)
    world.retract(req)
    assert req.kv_allocated_len == req.cache_protected_len == len(req.prefix_indices) == 0
    check_idle(world.allocator, world.req_to_token_pool, world.cache)
    assert world.readmit(req)
    assert req.cache_protected_len == 8
    world.cache_unfinished(req)
    world.check()
    assert req.kv_committed_len == 8 + 4
    world.finish(req)
    assert_idle(world)


def test_a_request_that_ends_between_chunks_gives_everything_back(impl: str) -> None:
    for is_insert in (True, False):
        world = World(impl, 4)
        req = world.admit(range(30), chunk=8)
        world.cache_unfinished(req)
        world.extend(req, 8)  # computed, not yet cached
        world.finish(req, is_insert)
        assert world.cache.evictable_size() == (16 if is_insert else 8)
        assert_idle(world)


def test_a_live_request_s_prefix_survives_eviction(impl: str) -> None:
    world = World(impl, 2)
    req = world.prefill(range(8))
    world.finish(world.prefill(range(100, 110)))
    assert world.cache.evict(1000) == 10
    world.check()
    assert world.match(range(8)) == world.row(req)


def test_namespaces_do_not_share_between_requests(impl: str) -> None:
    world = World(impl, 2)
    reqs = [world.prefill(range(8), extra_key=extra_key) for extra_key in (None, "a", "b")]
    world.check()
    assert len({slot for req in reqs for slot in world.row(req)}) == 24
    assert len(world.match(range(8), "a")) == 8
    assert world.match(range(8), "c") == []
    for req in reqs:
        world.finish(req)
    assert_idle(world)


@pytest.mark.parametrize("is_insert", [True, False])
def test_a_request_s_priority_protects_its_tokens(impl: str, is_insert: bool) -> None:
    world = World(impl, 1, eviction_policy="priority")
    world.finish(world.prefill([1, 2, 3], priority=5), is_insert)
    world.finish(world.prefill([4, 5, 6], priority=1))
    world.match([4, 5, 6])
    world.cache.evict(1)
    assert len(world.match([1, 2, 3])) == 3
    assert world.match([4, 5, 6]) == []


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_bigram_cache_keeps_one_token_less(impl: str, page_size: int) -> None:
    """The last token's draft KV waits for the token after it."""
    world = World(impl, page_size, is_bigram=True)
    req = world.prefill(range(9))
    whole = 8 // page_size * page_size
    assert req.cache_protected_len == whole
    assert len(req.prefix_indices) == 9
    world.check()
    row = world.row(req)
    assert world.match([*range(9), 77]) == row[:whole]
    parting = 3 // page_size * page_size
    assert world.match([0, 1, 2, 3, 77]) == row[:parting]  # token 3 is followed by another one
    world.decode(req, 100)
    world.check()
    world.finish(req)
    assert_idle(world)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_chunk_cache_finds_nothing_and_keeps_nothing(impl: str, page_size: int) -> None:
    world = World(impl, page_size, component="chunk_cache")
    assert world.cache.disable
    req = world.admit(range(11), chunk=4)
    while True:
        world.cache_unfinished(req)
        world.check()
        assert req.prefix_indices.tolist() == world.row(req)
        assert req.cache_protected_len == 0
        if len(req.prefix_indices) == 11:
            break
        world.extend(req, 4)
    world.decode(req, 100)
    assert world.match(range(11)) == []
    assert (world.cache.evictable_size(), world.cache.protected_size(), world.cache.evict(100)) == (0, 0, 0)
    assert list(world.cache.nodes()) == []
    other = world.prefill(range(11))
    assert set(world.row(other)).isdisjoint(world.row(req))
    world.check()
    world.retract(req)
    assert world.readmit(req)
    world.check()
    for live in (req, other):
        world.finish(live)
    assert world.allocator.available_size() == world.allocator.size
    assert_idle(world)


def test_the_radix_cache_is_not_disabled(impl: str) -> None:
    assert not World(impl, 1).cache.disable


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("impl_name", IMPLS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_lives(impl_name: str, page_size: int, component: str, data: st.DataObject) -> None:
    """CASES A1-A6: requests come, compute in chunks, decode, are retracted and end, in little memory; after
    every operation each slot has one owner and every request reads what was computed for its own tokens."""
    policy = data.draw(st.sampled_from(["lru", "lfu", "fifo", "priority"]))
    world = World(impl_name, page_size, num_pages=14, component=component, eviction_policy=policy)
    prompt = st.lists(st.integers(0, 1), min_size=1, max_size=5 * page_size + 2)
    waiting = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["admit", "admit", "chunk", "decode", "decode", "retract", "end"]))
        req = data.draw(st.sampled_from(world.live)) if world.live else None
        if action == "admit" and len(world.live) < 8:
            if waiting and data.draw(st.booleans()):
                req = waiting.pop()
                if world.readmit(req):
                    world.cache_unfinished(req)
                continue
            chunk = data.draw(st.sampled_from([None, page_size, 2 * page_size]))
            req = world.admit(data.draw(prompt), chunk, extra_key=data.draw(st.sampled_from([None, "a"])))
            # Several admitted requests may be computed before the first of them is cached.
            if req is not None and data.draw(st.booleans()):
                world.cache_unfinished(req)
        elif req is None:
            continue
        elif action == "chunk" and req.kv_committed_len < len(req.origin_input_ids):
            world.cache_unfinished(req)
            world.extend(req, page_size)
        elif action == "chunk" and len(req.fill_ids) == req.kv_committed_len:
            world.cache_unfinished(req)
        elif action == "decode" and req.kv_committed_len >= len(req.origin_input_ids):
            world.decode(req, data.draw(st.integers(0, 1)))
        elif action == "retract":
            world.retract(req)
            waiting.append(req)
        elif action == "end":
            world.finish(req, is_insert=data.draw(st.booleans()))
        world.check()
    while world.live:
        world.finish(world.live[0])
        world.check()
    assert_idle(world)
