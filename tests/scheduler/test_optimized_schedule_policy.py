"""The optimized policies over a tree that reports its changes: pass for pass the order of the reference over
the same tree, and how little of the queue a pass looks at."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from diptych.optimized.radix_cache import RadixCache
from diptych.optimized.schedule_policy import SchedulePolicy
from diptych.reference.memory_pool import TokenToKVPoolAllocator
from diptych.reference.schedule_policy import SchedulePolicy as ReferencePolicy
from diptych.shared.interfaces import RadixKey
from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.tools.conformance.contracts.schedule_policy.passes import CACHE_AWARE, Policy, random_req
from diptych.shared.types import Req, SamplingParams

WATCHED = [policy for policy in CACHE_AWARE if policy.tree == "optimized"]


class World:
    """One tree, one queue, both policies. Which of them goes first alternates: both probe the tree."""

    def __init__(self, policy: Policy, rng: random.Random) -> None:
        self.rng = rng
        self.allocator = TokenToKVPoolAllocator(64 * policy.page_size, policy.page_size, "cpu")
        self.tree = RadixCache(policy.page_size, self.allocator, is_bigram=policy.is_bigram)
        self.policies: list[Any] = [
            impl(policy.config(), self.tree) for impl in (SchedulePolicy, ReferencePolicy)
        ]
        self.queue = WaitingQueue()
        self.gone: list[Req] = []
        self.locked: list[Any] = []
        self.num_made = 0

    def random_key(self) -> RadixKey:
        made = random_req(self.rng, 0)
        return RadixKey(made.all_ids, made.extra_key, self.tree.is_bigram)

    def join(self) -> None:
        self.queue.append(random_req(self.rng, self.num_made))
        self.num_made += 1

    def leave(self) -> None:
        if self.queue:
            self.gone.append(self.rng.choice(self.queue))
            self.queue.remove(self.gone[-1])

    def come_back(self) -> None:
        if self.gone:
            self.queue.append(self.gone.pop(self.rng.randrange(len(self.gone))))
            self.queue[-1].output_ids.append(6)

    def insert(self) -> None:
        key = self.random_key()
        num_slots = len(key) // self.tree.page_size * self.tree.page_size
        self.tree.evict(num_slots - self.allocator.available_size())
        value = self.allocator.alloc(num_slots)
        if value is not None:
            self.allocator.free(value[: self.tree.insert(key, value).prefix_len])

    def match(self) -> None:
        self.tree.match_prefix(self.random_key())

    def evict(self) -> None:
        self.tree.evict(self.rng.randint(1, 40))

    def lock(self) -> None:
        self.locked.append(self.tree.match_prefix(self.random_key()).last_node)
        self.tree.inc_lock_ref(self.locked[-1])

    def unlock(self) -> None:
        if self.locked:
            self.tree.dec_lock_ref(self.locked.pop())

    def reset(self) -> None:
        if self.rng.random() < 0.2:
            self.tree.reset()
            self.allocator.clear()
            self.locked.clear()

    def order(self) -> None:
        self.policies.reverse()
        results = [policy.order(self.queue, self.gone) for policy in self.policies]
        orders = [[req.rid for req in result.order] for result in results]
        assert orders[0] == orders[1]
        assert results[0].deprioritized == results[1].deprioritized
        for req in list(self.queue)[: self.rng.randrange(3)]:
            self.queue.remove(req)


EVENTS = {"join": 9, "leave": 1, "come_back": 1, "insert": 4, "match": 2, "evict": 1, "lock": 1, "unlock": 1}
EVENTS |= {"reset": 1, "order": 5}


@pytest.mark.parametrize("policy", WATCHED, ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(i, marks=pytest.mark.full) for i in range(6, 12))]
)
def test_any_events_leave_the_order_of_the_reference(policy: Policy, seed: int) -> None:
    rng = random.Random(seed)
    world = World(policy, rng)
    for event in rng.choices(list(EVENTS), list(EVENTS.values()), k=250):
        getattr(world, event)()
    world.order()


def waiting(rid: int, tokens: list[int], **fields: Any) -> Req:
    return Req(str(rid), tokens, SamplingParams(max_new_tokens=rid % 7 + 1), seed=0, **fields)


def test_lpm_around_its_limit() -> None:
    """It matches up to 128 requests, then none, then the remaining ones."""
    world = World(WATCHED[0], random.Random(0))
    world.insert()
    for num_waiting in (120, 128, 129, 200, 128, 90):
        while len(world.queue) > num_waiting:
            world.queue.remove(world.queue[0])
        while len(world.queue) < num_waiting:
            world.join()
        waits = list(world.queue)
        world.order()
        for req in waits[::-1]:
            if req not in world.queue:
                world.queue.append(req)


class CountingTree(RadixCache):
    num_matches = 0

    def match_prefix(self, key: RadixKey) -> Any:
        self.num_matches += 1
        return super().match_prefix(key)


@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
def test_a_pass_matches_only_who_came_and_whose_match_changed(name: str) -> None:
    tree = CountingTree(1)
    policy = SchedulePolicy(Policy("", policy=name).config(), tree)
    queue = WaitingQueue([waiting(i, [i % 10, i, 1, 2]) for i in range(100)])

    def matches_of_a_pass() -> int:
        before = tree.num_matches
        list(policy.order(queue, []).order)
        return tree.num_matches - before

    def insert(*tokens: int) -> None:
        tree.insert(RadixKey(list(tokens)), torch.arange(len(tokens)))

    assert matches_of_a_pass() == 100
    assert matches_of_a_pass() == 0
    insert(3, 99)
    assert matches_of_a_pass() == 10  # those that begin with 3
    insert(3, 23, 1, 2)
    assert matches_of_a_pass() == 1  # the others part from it before it begins
    insert(50)
    assert matches_of_a_pass() == 0
    queue.remove(queue[17])
    queue.append(waiting(100, [7]))
    assert matches_of_a_pass() == 1
    tree.evict(3)
    assert matches_of_a_pass() <= 1
    assert tree.evict(tree.evictable_size()) > 0
    assert matches_of_a_pass() == 10
    tree.reset()
    assert matches_of_a_pass() == 100


@pytest.mark.parametrize("name", ["lof", "routing-key", "dfs-weight"])
def test_a_pass_looks_at_none_that_it_is_not_asked_for(name: str) -> None:
    """Until the order is walked, no request that waited before is read."""
    queue = WaitingQueue([waiting(i, [i], routing_key="a") for i in range(50)])
    policy = SchedulePolicy(Policy("", policy=name).config(), RadixCache(1))
    expected = [req.rid for req in policy.order(queue, []).order]
    for req in queue:
        req.__class__ = Unread
    result = policy.order(queue, [])
    for req in queue:
        req.__class__ = Req
    assert [req.rid for req in result.order] == expected


class Unread(Req):
    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return super().__getattribute__(name)
        raise AssertionError(f"{name} was read")
