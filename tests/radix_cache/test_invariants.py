"""The invariants checker finds every planted fault, and says what and how much."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from diptych.reference.chunk_cache import ChunkCache
from diptych.reference.radix_cache import RadixCache
from diptych.shared.interfaces.prefix_cache import RadixKey
from diptych.shared.interfaces.scheduler import SchedulerState
from diptych.shared.scheduling.invariants import InvariantViolation, check_idle, check_invariants
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld
from diptych.shared.types import Req
from tests.planted import Bug, Bugs


def busy_world(page_size: int = 2) -> tuple[CacheWorld, Req, Req]:
    """Two live requests that share 4 tokens, one of them with private tokens, beside a finished one."""
    world = CacheWorld(RadixCache, page_size)
    world.finish(world.prefill([9, 9, 9, 9]))
    first = world.prefill([1, 2, 3, 4, 5, 6])
    second = world.prefill([1, 2, 3, 4, 7, 8, 9])
    world.decode(first, 10)
    world.check()
    return world, first, second


def check(world: CacheWorld) -> None:
    state = SchedulerState(running=list(world.live))
    check_invariants(state, world.allocator, world.req_to_token_pool, world.cache)


def leak_a_slot(world: CacheWorld, first: Req, second: Req) -> None:
    world.allocator.alloc(world.page_size)


def leak_many_slots(world: CacheWorld, first: Req, second: Req) -> None:
    world.allocator.alloc(10)


def give_a_cached_slot_away(world: CacheWorld, first: Req, second: Req) -> None:
    world.allocator.free(world.cache.match_prefix(RadixKey([9, 9])).device_indices)


def give_a_private_slot_away(world: CacheWorld, first: Req, second: Req) -> None:
    world.allocator.free(torch.tensor(world.row(first)[-1:]))


def insert_what_a_request_still_owns(world: CacheWorld, first: Req, second: Req) -> None:
    """The leak has a twin: one slot in the tree and in a request."""
    page_start = world.row(second)[6] // world.page_size * world.page_size
    world.cache.insert(RadixKey([5, 5]), torch.arange(page_start, page_start + world.page_size))


def insert_the_dummy_page(world: CacheWorld, first: Req, second: Req) -> None:
    world.cache.insert(RadixKey([5, 5]), torch.arange(world.page_size))


def lock_once_too_often(world: CacheWorld, first: Req, second: Req) -> None:
    world.cache.inc_lock_ref(first.last_node)


def lock_an_unused_node(world: CacheWorld, first: Req, second: Req) -> None:
    world.cache.inc_lock_ref(world.cache.match_prefix(RadixKey([9, 9, 9, 9])).last_node)


def unlock_too_early(world: CacheWorld, first: Req, second: Req) -> None:
    world.cache.dec_lock_ref(second.last_node)


def make_a_lock_negative(world: CacheWorld, first: Req, second: Req) -> None:
    world.cache.match_prefix(RadixKey([9, 9, 9, 9])).last_node.lock_ref = -1


def change_the_node_of_the_finished(world: CacheWorld, **changes: Any) -> None:
    nodes = [node._replace(**changes) if node.key == [9, 9, 9, 9] else node for node in world.cache.nodes()]
    world.cache.nodes = lambda: iter(nodes)


def lose_a_slot_of_a_node(world: CacheWorld, first: Req, second: Req) -> None:
    change_the_node_of_the_finished(world, slots=[2, 3, 4])


def end_a_node_in_a_page(world: CacheWorld, first: Req, second: Req) -> None:
    change_the_node_of_the_finished(world, key=[9, 9, 9], slots=[2, 3, 4])


def miscount_evictable(world: CacheWorld, first: Req, second: Req) -> None:
    world.cache._evictable_size += 1


def miscount_protected(world: CacheWorld, first: Req, second: Req) -> None:
    world.cache._protected_size -= 1


def leak_a_row(world: CacheWorld, first: Req, second: Req) -> None:
    world.req_to_token_pool.alloc(1)


def free_a_live_row(world: CacheWorld, first: Req, second: Req) -> None:
    world.req_to_token_pool.free([first.req_pool_idx])


def share_a_row(world: CacheWorld, first: Req, second: Req) -> None:
    first.req_pool_idx = second.req_pool_idx


def stand_in_two_places(world: CacheWorld, first: Req, second: Req) -> None:
    world.live.append(first)


def forget_a_request(world: CacheWorld, first: Req, second: Req) -> None:
    world.live.remove(second)


def drop_the_row_but_not_the_slots(world: CacheWorld, first: Req, second: Req) -> None:
    world.req_to_token_pool.free([first.req_pool_idx])
    first.req_pool_idx = None


def leave_a_duplicate_in_the_row(world: CacheWorld, first: Req, second: Req) -> None:
    """CASES A2: the request goes on reading slots that are no longer its own."""
    world.req_to_token_pool.write(second.req_pool_idx, 0, torch.arange(40, 42))


def break_a_page(world: CacheWorld, first: Req, second: Req) -> None:
    row = world.row(second)
    world.req_to_token_pool.write(second.req_pool_idx, 6, torch.tensor([row[6] + 1]))


def leave_a_page_in_the_middle(world: CacheWorld, first: Req, second: Req) -> None:
    """The right offset, but in another page."""
    world.decode(second, 11)
    world.req_to_token_pool.write(
        second.req_pool_idx, 7, torch.tensor([world.row(second)[7] + world.page_size])
    )


def insert_many_slots_outside(world: CacheWorld, first: Req, second: Req) -> None:
    world.cache.insert(RadixKey([5] * 10), torch.arange(100, 110))


def protect_less_than_the_path(world: CacheWorld, first: Req, second: Req) -> None:
    first.cache_protected_len -= world.page_size


def commit_more_than_allocated(world: CacheWorld, first: Req, second: Req) -> None:
    first.kv_committed_len += 1


def change_a_cached_token(world: CacheWorld, first: Req, second: Req) -> None:
    second.origin_input_ids[1] = 77


def change_the_namespace(world: CacheWorld, first: Req, second: Req) -> None:
    second.extra_key = "other"


FAULTS = Bugs("invariant", "CacheWorld", "check_invariants")
for _fault, _message in (
    (leak_a_slot, r"2 slots have no owner"),
    (leak_many_slots, r"10 slots have no owner: (\d+, ){7}\d+ \.\.\. "),
    (give_a_cached_slot_away, r"2 slots have several owners"),
    (give_a_private_slot_away, r"2 slots have several owners"),
    (insert_what_a_request_still_owns, r"2 slots have several owners"),
    (insert_the_dummy_page, r"slots \[0, 1\] are outside 2\.\.65"),
    (lock_once_too_often, r"lock_ref 3, but .* are 2"),
    (lock_an_unused_node, r"lock_ref 1, but .* are 0"),
    (unlock_too_early, r"lock_ref 1, but .* are 2"),
    (make_a_lock_negative, r"lock_ref -1 \[slots"),
    (lose_a_slot_of_a_node, r"node \d has 4 tokens and 3 slots"),
    (end_a_node_in_a_page, r"node \d has 3 tokens: no whole pages"),
    (miscount_evictable, r"4 evictable and 8 protected"),
    (miscount_protected, r"4 evictable and 8 protected"),
    (leak_a_row, r"rows in use and free rows do not add up"),
    (free_a_live_row, r"rows in use and free rows do not add up"),
    (share_a_row, r"row \d is allocated to 2 requests"),
    (stand_in_two_places, r"in 2 places"),
    (forget_a_request, r"rows in use and free rows do not add up"),
    (drop_the_row_but_not_the_slots, r"7 slots and no row"),
    (leave_a_duplicate_in_the_row, r"position 0 is slot 40, in the tree \d"),
    (break_a_page, r"position 6 is slot \d+: not in its page's order"),
    (leave_a_page_in_the_middle, r"position 7 is slot \d+: not in its page's order"),
    (insert_many_slots_outside, r"slots \[100, 101, 102, 103, 104, 105, 106, 107\] are outside 2\.\.65"),
    (protect_less_than_the_path, r"cache_protected_len is 4, its path has 6 tokens"),
    (commit_more_than_allocated, r"protected 6 <= committed 8 <= allocated 7"),
    (change_a_cached_token, r"not its own"),
    (change_the_namespace, r"another extra_key"),
):
    _name = _fault.__name__.replace("_", " ")
    FAULTS.add(_name, _fault, _name, says=re.compile(_message))


@FAULTS.found_by(InvariantViolation)
def test_a_planted_fault_is_found(bug: Bug) -> None:
    """CASES A1: a checker that never fires would prove nothing."""
    world, first, second = busy_world()
    check(world)
    bug.plant(world, first, second)
    check(world)


def test_the_message_has_all_numbers() -> None:
    world, _, _ = busy_world()
    world.allocator.alloc(4)
    # 64 slots: 4 finished, 8 shared by the live ones, a page each for one private token.
    with pytest.raises(InvariantViolation) as violation:
        check(world)
    assert "free 44 + evictable 4 + protected 8 + in use 4 = 60 of 64" in str(violation.value)
    assert "rows: free 6 + in use 2 of 8" in str(violation.value)


def test_idle_means_that_everything_is_free_or_evictable() -> None:
    world, first, second = busy_world()
    with pytest.raises(InvariantViolation):
        check_idle(world.allocator, world.req_to_token_pool, world.cache)
    world.finish(first)
    world.finish(second)
    check_idle(world.allocator, world.req_to_token_pool, world.cache)
    node = world.cache.match_prefix(RadixKey([9, 9])).last_node
    world.cache.inc_lock_ref(node)  # a request that ended and still locks
    with pytest.raises(InvariantViolation, match="lock_ref 1"):
        check_idle(world.allocator, world.req_to_token_pool, world.cache)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_in_each_place_of_the_scheduler_counts(page_size: int) -> None:
    world = CacheWorld(RadixCache, page_size)
    running, chunked = world.prefill(range(9)), world.admit(range(20, 50), chunk=8)
    world.cache_unfinished(chunked)
    waiting = world.prefill(range(60, 67))
    world.retract(waiting)
    state = SchedulerState([waiting], [running], chunked)
    check_invariants(state, world.allocator, world.req_to_token_pool, world.cache)
    state.chunked_req = None
    with pytest.raises(InvariantViolation):
        check_invariants(state, world.allocator, world.req_to_token_pool, world.cache)


def test_a_request_whose_node_was_evicted_is_found() -> None:
    world, first, _ = busy_world()
    node = world.cache.match_prefix(RadixKey([9, 9, 9, 9])).last_node
    world.cache.evict(4)
    first.last_node = node
    with pytest.raises(InvariantViolation, match="not in the tree"):
        check(world)


def test_the_chunk_cache_passes_too() -> None:
    world = CacheWorld(ChunkCache, 4)
    req = world.prefill(range(6))
    check(world)
    world.allocator.free(torch.tensor(world.row(req)[:1]))
    with pytest.raises(InvariantViolation, match="4 slots have several owners"):
        check(world)
